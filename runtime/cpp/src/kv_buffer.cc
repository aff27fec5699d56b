#include "kv_buffer.h"

#include <algorithm>

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

KvBuffer::KvBuffer(const Memory& memory, const Model& model, const Schedule& schedule, int64_t rows, int64_t prompt,
                   int64_t new_tokens)
    : memory_(memory),
      rows_(rows),
      kv_heads_(model.num_kv_heads),
      head_size_(model.head_size),
      slot_bytes_(model.head_size * static_cast<int64_t>(memory.float_size())),
      block_(nullptr, nullptr) {
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    starts_.push_back(static_cast<int64_t>(bytes()));
    slots_.push_back(Slots(schedule, layer, prompt, new_tokens));
  }
  block_ = memory.Allocate(bytes());
}

std::vector<int64_t> KvBuffer::Shape(int64_t layer, int64_t rows) const { return {rows, kv_heads_, SlotsOf(layer), head_size_}; }

void KvBuffer::CopyRow(int64_t from, int64_t to, int64_t length) {
  for (int64_t layer = 0; layer < static_cast<int64_t>(slots_.size()); ++layer) {
    if (!Has(layer)) continue;
    // on a GPU a call costs more than the slots that hold nothing yet: a row is one copy there
    const int64_t pieces = memory_.on_host() ? kv_heads_ : 1;
    const int64_t stride = RowBytes(layer) / pieces;
    const auto bytes = static_cast<size_t>(memory_.on_host() ? std::min(length, SlotsOf(layer)) * slot_bytes_ : stride);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      memory_.Copy(Key(layer, to) + piece * stride, Key(layer, from) + piece * stride, bytes);
      memory_.Copy(Value(layer, to) + piece * stride, Value(layer, from) + piece * stride, bytes);
    }
  }
}

uint64_t KvBuffer::bytes() const {
  int64_t bytes = 0;
  for (int64_t layer = 0; layer < static_cast<int64_t>(slots_.size()); ++layer) bytes += 2 * rows_ * RowBytes(layer);
  return static_cast<uint64_t>(bytes);
}

}  // namespace skd
