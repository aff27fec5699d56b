// The KV buffer: one preallocated key and value array a layer, shared by all variants, with the schedule's shape.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "manifest.h"
#include "memory.h"

namespace skd {

// Memory and nothing else: a layer's keys and values [B, KVH, C, D] in the memory's float type, C its own number of slots.
class KvBuffer {
 public:
  // `prompt` and `new_tokens`: the most of any row. `memory` must outlive the buffer.
  KvBuffer(const Memory& memory, const Model& model, const Schedule& schedule, int64_t rows, int64_t prompt, int64_t new_tokens);

  // Positions that a row of `layer` has room for.
  int64_t SlotsOf(int64_t layer) const { return slots_[static_cast<size_t>(layer)]; }
  // Whether any decode step computes `layer`.
  bool Has(int64_t layer) const { return SlotsOf(layer) > 0; }
  // The addresses of `row`, from which the later rows go on; `layer` must have slots.
  std::byte* Key(int64_t layer, int64_t row) {
    return block_.get() + starts_[static_cast<size_t>(layer)] + row * RowBytes(layer);
  }
  std::byte* Value(int64_t layer, int64_t row) { return Key(layer, row) + rows_ * RowBytes(layer); }
  // [rows, KVH, C, D] of `rows` rows.
  std::vector<int64_t> Shape(int64_t layer, int64_t rows) const;
  // Copy the first `length` slots of a row over another row's.
  void CopyRow(int64_t from, int64_t to, int64_t length);
  uint64_t bytes() const;

 private:
  int64_t RowBytes(int64_t layer) const { return kv_heads_ * SlotsOf(layer) * slot_bytes_; }

  const Memory& memory_;
  int64_t rows_, kv_heads_, head_size_, slot_bytes_;
  std::vector<int64_t> slots_, starts_;  // a layer's bytes begin there: its keys, then its values
  Block block_;
};

}  // namespace skd
