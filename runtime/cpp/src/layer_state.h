// What a layer keeps of a row: keys and values, and, with linear attention and the like, states whose size does not depend on
// the row's length.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "manifest.h"

namespace skd {

// An array that a layer keeps of a row, read and written in place.
struct StateArray {
  std::string past, present;   // the engine's input and output: "past_key.3", "present_key.3"
  std::vector<int64_t> shape;  // of one row
  // True: keys or values [KVH, C, D] in the engines' float type, with a slot per position, written before it is read.
  // False: a state, zero before the first token; fp32 on every target, because each step's rounding error stays in it.
  bool has_slots;
};

// The arrays of `layer` for a row with `slots` slots, as key_shapes and state_shapes of runtime/kv_buffer.py.
std::vector<StateArray> LayerState(const Model& model, int64_t layer, int64_t slots);

// Whether `layer` keeps anything of a row.
bool KeepsAnything(const Model& model, int64_t layer);

// The layers outside `layers` whose keys and values `layers` read.
std::vector<int64_t> KeySources(const Model& model, const std::vector<int64_t>& layers);

}  // namespace skd
