#include "kv_buffer.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace skd {
namespace {

// Position t of a row lies in slot t (absolute) or prompt + t (generated); none where no decode step computes the layer.
int64_t Slots(const Schedule& schedule, int64_t layer, int64_t prompt, int64_t new_tokens) {
  const std::optional<int64_t> cap = schedule.Cap(layer);
  if (schedule.anchor() == Anchor::kAbsolute) return cap ? std::min(prompt + new_tokens, *cap) : prompt + new_tokens;
  if (cap && *cap == 0) return 0;
  return prompt + (cap ? std::min(new_tokens, *cap) : new_tokens);
}

}  // namespace

KvBuffer::KvBuffer(const Model& model, const Schedule& schedule, int64_t rows, int64_t prompt, int64_t new_tokens)
    : rows_(rows), kv_heads_(model.num_kv_heads), head_size_(model.head_size) {
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    slots_.push_back(Slots(schedule, layer, prompt, new_tokens));
    for (std::vector<Block>* blocks : {&keys_, &values_}) {
      const auto count = static_cast<size_t>(rows * RowSize(layer));
      // zeroed by the system page by page, when a page is first touched
      auto* memory =
          count == 0 ? nullptr : static_cast<float*>(std::calloc(count, sizeof(float)));  // NOLINT(cppcoreguidelines-no-malloc)
      if (count > 0 && memory == nullptr) throw std::bad_alloc();
      blocks->emplace_back(memory);
    }
  }
}

float* KvBuffer::At(std::vector<Block>& blocks, int64_t layer, int64_t row) {
  return blocks[static_cast<size_t>(layer)].get() + row * RowSize(layer);
}

std::vector<int64_t> KvBuffer::Shape(int64_t layer, int64_t rows) const { return {rows, kv_heads_, SlotsOf(layer), head_size_}; }

void KvBuffer::CopyRow(int64_t from, int64_t to, int64_t length) {
  for (int64_t layer = 0; layer < static_cast<int64_t>(slots_.size()); ++layer) {
    if (!Has(layer)) continue;
    const auto bytes = static_cast<size_t>(std::min(length, SlotsOf(layer)) * head_size_) * sizeof(float);
    const int64_t stride = SlotsOf(layer) * head_size_;
    for (int64_t head = 0; head < kv_heads_; ++head) {
      std::memcpy(Key(layer, to) + head * stride, Key(layer, from) + head * stride, bytes);
      std::memcpy(Value(layer, to) + head * stride, Value(layer, from) + head * stride, bytes);
    }
  }
}

uint64_t KvBuffer::bytes() const {
  int64_t floats = 0;
  for (int64_t layer = 0; layer < static_cast<int64_t>(slots_.size()); ++layer) floats += 2 * rows_ * RowSize(layer);
  return static_cast<uint64_t>(floats) * sizeof(float);
}

}  // namespace skd
