#include "layer_state.h"

#include <algorithm>
#include <set>
#include <utility>

namespace skd {

std::vector<StateArray> LayerState(const Model& model, int64_t layer, int64_t slots) {
  const auto array = [layer](const std::string& name, std::vector<int64_t> shape, bool has_slots) {
    const std::string of_layer = "_" + name + "." + std::to_string(layer);
    return StateArray{"past" + of_layer, "present" + of_layer, std::move(shape), has_slots};
  };
  const LayerGroup group = model.GroupOf(layer);
  std::vector<StateArray> arrays;
  if (group.keys) {
    const std::vector<int64_t> shape{group.keys->num_heads, slots, group.keys->head_size};
    arrays = {array("key", shape, true), array("value", shape, true)};
  }
  for (const State& state : group.states) arrays.push_back(array(state.name, state.shape, false));
  return arrays;
}

bool KeepsAnything(const Model& model, int64_t layer) {
  const LayerGroup group = model.GroupOf(layer);
  return group.keys || !group.states.empty();
}

std::vector<int64_t> KeySources(const Model& model, const std::vector<int64_t>& layers) {
  std::set<int64_t> sources;
  for (const int64_t layer : layers) {
    const std::optional<int64_t> source = model.GroupOf(layer).keys_of;
    if (source && std::find(layers.begin(), layers.end(), *source) == layers.end()) sources.insert(*source);
  }
  return {sources.begin(), sources.end()};
}

}  // namespace skd
