// The KV buffer: one preallocated key and value array a layer, shared by all variants, with the schedule's shape. It also
// holds the states of layers with linear attention and the like. Layers that use another layer's keys have none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bindings.h"
#include "layer_state.h"
#include "manifest.h"
#include "memory.h"

namespace skd {

// The slots of each layer if no row has more than `prompt` prompt tokens and `new_tokens` generated ones. 0: no decode step
// computes the layer.
std::vector<int64_t> SlotsPerLayer(const Schedule& schedule, int64_t prompt, int64_t new_tokens);

// Only memory: each layer's arrays [B, ...], as LayerState describes them, initially zero.
class KvBuffer {
 public:
  // `slots`: C of each layer; 0: the layer needs neither slots nor states. `memory` must outlive the buffer.
  KvBuffer(const Memory& memory, const Model& model, std::vector<int64_t> slots, int64_t rows);

  // Positions that a row of `layer` has room for.
  int64_t SlotsOf(int64_t layer) const { return slots_[static_cast<size_t>(layer)]; }
  // Whether any decode step computes `layer`.
  bool Has(int64_t layer) const { return SlotsOf(layer) > 0; }
  // Add `rows` rows of `layer`, from `row` on, to `bindings`: its engine reads and writes them in place. The buffer must have
  // the layer.
  void Bind(int64_t layer, int64_t row, int64_t rows, Bindings* bindings);
  // The same for keys and values only, which engines of other layers read.
  void BindRead(int64_t layer, int64_t row, int64_t rows, Bindings* bindings);
  // Zero a row's states; on a GPU its keys and values too, where an earlier row may have left a NaN.
  void ClearRow(int64_t row);
  // Copy the first `length` slots of a row, and its states, over another row's.
  void CopyRow(int64_t from, int64_t to, int64_t length);
  uint64_t bytes() const { return static_cast<uint64_t>(bytes_); }

 private:
  struct Array {
    StateArray state;
    int64_t start = 0, row_bytes = 0;
  };
  std::byte* At(const Array& array, int64_t row) { return block_.get() + array.start + row * array.row_bytes; }

  const Memory& memory_;
  std::vector<int64_t> slots_;
  std::vector<std::vector<Array>> layers_;
  int64_t bytes_ = 0;
  Block block_;
};

}  // namespace skd
