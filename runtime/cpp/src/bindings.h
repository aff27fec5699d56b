// Every engine's inputs and outputs by name, element type and shape: the contract that runtime/bindings.py writes down.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine.h"
#include "layer_state.h"
#include "manifest.h"
#include "memory.h"

namespace skd {

namespace names {

constexpr char kInputIds[] = "input_ids", kPositionIds[] = "position_ids";
constexpr char kHidden[] = "hidden", kHiddenOut[] = "hidden_out";
constexpr char kSeqlensK[] = "seqlens_k", kTotalSequenceLength[] = "total_sequence_length";
constexpr char kLast[] = "last", kLogits[] = "logits";
constexpr char kTiedWeight[] = "tied_weight";

}  // namespace names

// Rows of what a tied embedding and head share: as bindings.tied_rows of Python.
int64_t TiedRows(const Model& model);

// Of an array that a layer keeps, in this memory.
ONNXTensorElementDataType TypeOf(const Memory& memory, const StateArray& array);

struct Bindings {
  std::vector<Tensor> inputs;  // that an engine may read; not each reads all
  std::vector<Tensor> outputs;

  // `rows` rows of what a layer keeps: an input and an output at one address.
  void AddInPlace(const Memory& memory, const StateArray& array, std::byte* data, int64_t rows);
  // The same of keys or values that other layers read, with the new tokens' in them: an input.
  void AddRead(const Memory& memory, const StateArray& array, std::byte* data, int64_t rows);
};

// Without addresses; -1 in a shape: any size (rows, tokens, slots).
Bindings EmbedBindings(const Memory& memory, const Model& model);
Bindings SegmentBindings(const Memory& memory, const Model& model, const std::vector<int64_t>& layers);
Bindings HeadBindings(const Memory& memory, const Model& model);

// Throws SKD_ERROR_BUNDLE where an engine, `where` its file, is another than `wanted`: files that were swapped, a manifest that
// was edited. ONNX Runtime would say so at the first run, or write past an array.
void CheckBindings(const Engine& engine, const Bindings& wanted, const std::string& where);

}  // namespace skd
