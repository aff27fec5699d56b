// Every engine's inputs and outputs by name, element type and shape: the contract that runtime/bindings.py writes down.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine.h"
#include "manifest.h"
#include "memory.h"

namespace skd {

// Tensors without an address; -1 in a shape: any size (rows, tokens, slots).
struct Bindings {
  std::vector<Tensor> inputs;  // that an engine may read; not each reads all
  std::vector<Tensor> outputs;
};

Bindings EmbedBindings(const Memory& memory, const Model& model);
Bindings SegmentBindings(const Memory& memory, const Model& model, const std::vector<int64_t>& layers);
Bindings HeadBindings(const Memory& memory, const Model& model);

// Throws SKD_ERROR_BUNDLE where an engine, `where` its file, is another than `wanted`: files that were swapped, a manifest that
// was edited. ONNX Runtime would say so at the first run, or write past an array.
void CheckBindings(const Engine& engine, const Bindings& wanted, const std::string& where);

}  // namespace skd
