#include "layer_state.h"

#include <algorithm>
#include <utility>

namespace skd {

std::vector<StateArray> LayerState(const Model& model, int64_t layer, int64_t slots) {
  const auto array = [layer](const std::string& name, std::vector<int64_t> shape, bool has_slots) {
    const std::string of_layer = "_" + name + "." + std::to_string(layer);
    return StateArray{"past" + of_layer, "present" + of_layer, std::move(shape), has_slots};
  };
  const auto& linear = model.linear_attention;
  if (linear && std::binary_search(linear->layers.begin(), linear->layers.end(), layer)) {
    return {array("conv_state", linear->conv_state, false), array("recurrent_state", linear->recurrent_state, false)};
  }
  const std::vector<int64_t> shape{model.num_kv_heads, slots, model.head_size};
  return {array("key", shape, true), array("value", shape, true)};
}

}  // namespace skd
