// Every engine's inputs and outputs by name, element type and shape: the contract that runtime/bindings.py documents.
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

// Rows of the weight that a tied embedding and head share, as tied_rows of runtime/bindings.py.
int64_t TiedRows(const Model& model);

// The element type of an array that a layer keeps in this memory.
ONNXTensorElementDataType TypeOf(const Memory& memory, const StateArray& array);

struct Bindings {
  std::vector<Tensor> inputs;  // that an engine may read; not every engine reads all of them
  std::vector<Tensor> outputs;

  // Add `rows` rows of an array that a layer keeps, as an input and an output at the same address.
  void AddInPlace(const Memory& memory, const StateArray& array, std::byte* data, int64_t rows);
  // Add `rows` rows of keys or values that other layers read, as an input. They include the new tokens' ones.
  void AddRead(const Memory& memory, const StateArray& array, std::byte* data, int64_t rows);
};

// What each kind of engine may read and must write, without addresses. -1 in a shape: any size (rows, tokens, slots).
Bindings EmbedBindings(const Memory& memory, const Model& model);
Bindings SegmentBindings(const Memory& memory, const Model& model, const std::vector<int64_t>& layers);
Bindings HeadBindings(const Memory& memory, const Model& model);

// Throws SKD_ERROR_BUNDLE if the inputs and outputs of an engine, loaded from the file `where`, are not those of `wanted`:
// files were swapped, or the manifest was edited. ONNX Runtime would notice only at the first run, or write past an array.
void CheckBindings(const Engine& engine, const Bindings& wanted, const std::string& where);

}  // namespace skd
