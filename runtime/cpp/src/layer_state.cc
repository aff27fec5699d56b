#include "layer_state.h"

#include <algorithm>
#include <utility>

namespace skd {

std::vector<StateArray> LayerState(const Model& model, int64_t layer, int64_t slots) {
  const auto array = [layer](const std::string& name, std::vector<int64_t> shape, bool has_slots) {
    const std::string of_layer = "_" + name + "." + std::to_string(layer);
    return StateArray{"past" + of_layer, "present" + of_layer, std::move(shape), has_slots};
  };
  const auto group = std::find_if(model.state_layers.begin(), model.state_layers.end(), [layer](const StateLayers& each) {
    return std::binary_search(each.layers.begin(), each.layers.end(), layer);
  });
  const bool grouped = group != model.state_layers.end();
  std::vector<StateArray> arrays;
  if (!grouped || group->attention) {
    const std::vector<int64_t> shape{model.num_kv_heads, slots, model.head_size};
    arrays = {array("key", shape, true), array("value", shape, true)};
  }
  if (!grouped) return arrays;
  for (const State& state : group->states) arrays.push_back(array(state.name, state.shape, false));
  return arrays;
}

}  // namespace skd
