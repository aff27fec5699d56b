// The KV buffer: one preallocated key and value array a layer, shared by all variants, with the schedule's shape; of a layer with
// linear attention and its like its states; layers that read the keys and values of another have none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bindings.h"
#include "layer_state.h"
#include "manifest.h"
#include "memory.h"

namespace skd {

// Slots of each layer where no row has more tokens than `prompt` and `new_tokens`; 0: no decode step computes the layer.
std::vector<int64_t> SlotsPerLayer(const Schedule& schedule, int64_t prompt, int64_t new_tokens);

// Memory and nothing else: each layer's arrays [B, ...] as LayerState says, zeros at first.
class KvBuffer {
 public:
  // `slots`: C, of each layer; 0: it needs none, nor any other state. `memory` must outlive the buffer.
  KvBuffer(const Memory& memory, const Model& model, std::vector<int64_t> slots, int64_t rows);

  // Positions that a row of `layer` has room for.
  int64_t SlotsOf(int64_t layer) const { return slots_[static_cast<size_t>(layer)]; }
  // Whether any decode step computes `layer`.
  bool Has(int64_t layer) const { return SlotsOf(layer) > 0; }
  // Rows `row ..` of `layer`, `rows` of them, as its engine reads and writes them in place; the buffer must have the layer.
  void Bind(int64_t layer, int64_t row, int64_t rows, Bindings* bindings);
  // The same of the keys and values alone, as engines of other layers read them.
  void BindRead(int64_t layer, int64_t row, int64_t rows, Bindings* bindings);
  // Zeros for what states have summed up of a row; on a device for its keys and values too, in which an earlier row may have
  // left a NaN.
  void ClearRow(int64_t row);
  // Copy the first `length` slots of a row, and what has no slots, over another row's.
  void CopyRow(int64_t from, int64_t to, int64_t length);
  uint64_t bytes() const { return static_cast<uint64_t>(bytes_); }

 private:
  struct Array {
    StateArray of;
    int64_t start, row_bytes;
  };
  std::byte* At(const Array& array, int64_t row) { return block_.get() + array.start + row * array.row_bytes; }

  const Memory& memory_;
  std::vector<int64_t> slots_;
  std::vector<std::vector<Array>> layers_;
  int64_t bytes_ = 0;
  Block block_;
};

}  // namespace skd
