// What a layer keeps of a row: keys and values, and with linear attention and its like states of one size, whatever the length.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "manifest.h"

namespace skd {

// An array of a row, read and written in place.
struct StateArray {
  std::string past, present;   // the engine's input and output: "past_key.3", "present_key.3"
  std::vector<int64_t> shape;  // of one row
  // A slot a position, written before it is read: [KVH, C, D], in the engines' float type; else zeros before the first token, in
  // fp32 on every target, since each step's rounding would stay in it.
  bool has_slots;
};

// As kv_buffer.key_state and constant_state of Python: `layer`'s arrays where a row has `slots` slots.
std::vector<StateArray> LayerState(const Model& model, int64_t layer, int64_t slots);

// Whether `layer` keeps anything of a row.
bool Keeps(const Model& model, int64_t layer);

// The layers outside of `layers` whose keys and values these read.
std::vector<int64_t> KeySources(const Model& model, const std::vector<int64_t>& layers);

}  // namespace skd
