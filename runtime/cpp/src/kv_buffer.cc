#include "kv_buffer.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

namespace skd {
namespace {

constexpr int64_t kAlignment = 16;  // bytes that attention's kernels read at a time

// Position t of a row lies in slot t (absolute) or prompt + t (generated). No slots if no decode step computes the layer.
int64_t Slots(const Schedule& schedule, int64_t layer, int64_t prompt, int64_t new_tokens) {
  const std::optional<int64_t> cap = schedule.Cap(layer);
  if (schedule.anchor() == Anchor::kAbsolute) return cap ? std::min(prompt + new_tokens, *cap) : prompt + new_tokens;
  if (cap && *cap == 0) return 0;
  return prompt + (cap ? std::min(new_tokens, *cap) : new_tokens);
}

}  // namespace

std::vector<int64_t> SlotsPerLayer(const Schedule& schedule, int64_t prompt, int64_t new_tokens) {
  std::vector<int64_t> slots;
  for (int64_t layer = 0; layer < schedule.num_layers(); ++layer) slots.push_back(Slots(schedule, layer, prompt, new_tokens));
  return slots;
}

KvBuffer::KvBuffer(const Memory& memory, const Model& model, std::vector<int64_t> slots, int64_t rows)
    : memory_(memory), slots_(std::move(slots)), layers_(slots_.size()), block_(nullptr, nullptr) {
  for (int64_t layer = 0; layer < static_cast<int64_t>(slots_.size()); ++layer) {
    if (!Has(layer)) continue;
    for (StateArray& state : LayerState(model, layer, SlotsOf(layer))) {
      const auto size = static_cast<int64_t>(SizeOf(TypeOf(memory, state)));
      const int64_t row_bytes = std::accumulate(state.shape.begin(), state.shape.end(), size, std::multiplies<>());
      bytes_ = (bytes_ + kAlignment - 1) / kAlignment * kAlignment;  // the array before may be a state of any size
      layers_[static_cast<size_t>(layer)].push_back({std::move(state), bytes_, row_bytes});
      bytes_ += rows * row_bytes;
    }
  }
  block_ = memory.Allocate(bytes());
}

void KvBuffer::Bind(int64_t layer, int64_t row, int64_t rows, Bindings* bindings) {
  for (const Array& array : layers_[static_cast<size_t>(layer)]) {
    bindings->AddInPlace(memory_, array.state, At(array, row), rows);
  }
}

void KvBuffer::BindRead(int64_t layer, int64_t row, int64_t rows, Bindings* bindings) {
  for (const Array& array : layers_[static_cast<size_t>(layer)]) {
    if (array.state.has_slots) bindings->AddRead(memory_, array.state, At(array, row), rows);
  }
}

void KvBuffer::ClearRow(int64_t row) {
  for (const auto& arrays : layers_) {
    for (const Array& array : arrays) {
      // on a GPU attention weighs every slot, invalid ones by 0, but 0 times an earlier row's NaN is still NaN
      if (!array.state.has_slots || !memory_.on_host()) memory_.Clear(At(array, row), static_cast<size_t>(array.row_bytes));
    }
  }
}

void KvBuffer::CopyRow(int64_t from, int64_t to, int64_t length) {
  for (const auto& arrays : layers_) {
    for (const Array& array : arrays) {
      // on a GPU a call costs more than copying slots that hold nothing yet, so a row's array is copied as a whole
      const bool by_head = array.state.has_slots && memory_.on_host();
      const int64_t pieces = by_head ? array.state.shape[0] : 1;
      const int64_t stride = array.row_bytes / pieces, slots = by_head ? array.state.shape[1] : 1;
      const auto bytes = static_cast<size_t>(by_head ? std::min(length, slots) * (stride / slots) : stride);
      for (int64_t piece = 0; piece < pieces; ++piece) {
        memory_.Copy(At(array, to) + piece * stride, At(array, from) + piece * stride, bytes);
      }
    }
  }
}

}  // namespace skd
