#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "elapsed.h"

namespace skd {
namespace {

constexpr int64_t kPrefillChunk = 512;  // prompt tokens a pass: bounds the attention scores to chunk x prompt

size_t Size(int64_t count) { return static_cast<size_t>(count); }

Tensor Int64s(const Memory& memory, std::string name, std::byte* data, std::vector<int64_t> shape) {
  return memory.TensorAt(std::move(name), data, std::move(shape), ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
}

Tensor SeqlensK(const Memory& memory, std::byte* data, int64_t count) {
  return memory.TensorAt(names::kSeqlensK, data, {count}, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
}

Tensor Total(int32_t* data) { return {names::kTotalSequenceLength, data, {1}, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}; }

Tensor LogitsAt(const Memory& memory, std::byte* data, std::vector<int64_t> shape) {
  return memory.TensorAt(names::kLogits, data, std::move(shape), ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
}

}  // namespace

void RethrowAsHalfDone(const std::string& work) {
  std::string reason = "no memory is left";
  try {
    throw;
  } catch (const Error& error) {
    if (error.code() != SKD_ERROR_CAPACITY) throw;
    reason = error.what();
  } catch (const std::bad_alloc&) {
  }
  throw TargetError(work + " failed halfway (" + reason + ")", "destroy the session and create another");
}

Decoder::Decoder(std::shared_ptr<const Bundle> bundle, Schedule schedule, int64_t max_rows, int64_t max_prompt, int64_t max_new)
    : bundle_(std::move(bundle)),
      schedule_(std::move(schedule)),
      hidden_size_(bundle_->manifest.model.hidden_size),
      vocab_size_(bundle_->manifest.model.vocab_size),
      kv_(bundle_->memory, bundle_->manifest.model, SlotsPerLayer(schedule_, max_prompt, max_new), max_rows),
      hidden_(bundle_->memory.Allocate(Size(max_rows * hidden_size_) * bundle_->memory.float_size())),
      prompt_hidden_(bundle_->memory.Allocate(Size(max_prompt * hidden_size_) * bundle_->memory.float_size())),
      logits_(bundle_->memory, max_rows * vocab_size_),
      ids_(bundle_->memory, max_rows),
      position_ids_(bundle_->memory, max_rows),
      last_(bundle_->memory, max_rows),
      prompt_ids_(bundle_->memory, max_prompt),
      prompt_positions_(bundle_->memory, max_prompt),
      prompt_last_(bundle_->memory, 1),
      seqlens_k_(bundle_->memory, max_rows),
      prompt_seqlens_k_(bundle_->memory, max_prompt),
      totals_(Size(max_rows)),
      bound_segments_(Size(max_rows)),
      bound_embeds_(Size(max_rows)),
      bound_heads_(Size(max_rows)) {
  positions_.reserve(Size(max_rows));
  counts_.reserve(Size(max_rows));
  route_counts_.reserve(Size(max_rows));
  std::iota(prompt_positions_.data(), prompt_positions_.data() + max_prompt, 0);
  prompt_positions_.Send(max_prompt);
  std::iota(prompt_seqlens_k_.data(), prompt_seqlens_k_.data() + max_prompt, 0);
  prompt_seqlens_k_.Send(max_prompt);
  for (const SegmentEngine& segment : bundle_->segments) {
    least_counts_.push_back(schedule_.LeastCount(segment.layers.front()));
    most_totals_.push_back(static_cast<int32_t>(kv_.SlotsOf(segment.layers.front())));
    const auto keeps_anything = [this](int64_t layer) { return KeepsAnything(bundle_->manifest.model, layer); };
    if (std::any_of(segment.layers.begin(), segment.layers.end(), keeps_anything)) {
      first_segment_keeping_nothing_ = least_counts_.size();  // the segment after this one, so far
    }
  }
}

int64_t Decoder::Step(const int64_t* tokens) {
  const int64_t count = rows();
  int32_t longest = 0;
  for (int64_t row = count - 1; row >= 0; --row) {
    const int64_t length = positions_[Size(row)].length;
    ids_[row] = tokens[row];
    position_ids_[row] = length;
    seqlens_k_[row] = static_cast<int32_t>(length);
    longest = std::max(longest, static_cast<int32_t>(length + 1));
    totals_[Size(row)] = longest;  // of this row and those after it
  }
  ids_.Send(count);
  position_ids_.Send(count);
  seqlens_k_.Send(count);
  return Step();
}

int64_t Decoder::Step() {
  counts_.clear();
  for (const Position& position : positions_) counts_.push_back(schedule_.LayersAt(position.t));
  if (counts_ != route_counts_) FindRoute();
  const auto began = std::chrono::steady_clock::now();
  try {
    // nothing happens between two calls, so one clock times all of them (a reading takes 50 ns)
    for (const Call& call : route_) graph_launches_ += call.Repeat() ? 1 : 0;
  } catch (...) {
    RethrowAsHalfDone("a decode step");
  }
  engine_ns_ += NanosecondsSince(began);
  for (Position& position : positions_) {
    ++position.length;
    ++position.t;
  }
  return counts_.back();
}

const float* Decoder::Logits(int64_t row) const {
  logits_.Receive(row * vocab_size_, vocab_size_);
  return logits_.data() + row * vocab_size_;
}

Decoder::RowView Decoder::ViewFrom(int64_t row) {
  return {reinterpret_cast<int64_t*>(ids_.engine_address(row)), reinterpret_cast<int64_t*>(position_ids_.engine_address(row)),
          reinterpret_cast<int32_t*>(seqlens_k_.engine_address(row)),
          reinterpret_cast<const float*>(logits_.engine_address(row * vocab_size_))};
}

// A segment runs on the suffix of the rows that compute its layers: layer counts never fall from row to row.
void Decoder::FindRoute() {
  route_counts_.clear();  // if Bind throws, `route_` must not look complete
  route_.assign(1, BoundEmbed().call());
  for (size_t segment = 0; segment < least_counts_.size(); ++segment) {
    const auto first = std::lower_bound(counts_.begin(), counts_.end(), least_counts_[segment]);
    if (first != counts_.end()) route_.push_back(BoundSegment(segment, first - counts_.begin()).call());
  }
  route_.push_back(BoundHead().call());
  route_counts_ = counts_;
}

bool Decoder::Begin(const int64_t* prompt, int64_t length) {
  // with anchor `absolute`, a row that joins may move the others one place up
  const int64_t row = rows() + (schedule_.anchor() == Anchor::kAbsolute ? 1 : 0);
  if (row >= static_cast<int64_t>(totals_.size())) return false;
  prefill_.emplace(StartPrefill(row, prompt, length));
  return true;
}

bool Decoder::RunPart(int64_t work) {
  try {
    return RunPasses(&*prefill_, work);
  } catch (...) {
    prefill_.reset();
    throw;
  }
}

void Decoder::Abandon() {
  prefill_.reset();
  bundle_->memory.WaitForAll();  // the next prompt's ids take the place of this one's
}

Decoder::Position Decoder::FirstPosition(int64_t prompt_length) const {
  return {prompt_length, schedule_.anchor() == Anchor::kAbsolute ? prompt_length : 0};
}

// Runs the embedding of a prompt.
Decoder::Prefill Decoder::StartPrefill(int64_t row, const int64_t* prompt, int64_t length) {
  const Memory& memory = bundle_->memory;
  std::copy(prompt, prompt + length, prompt_ids_.data());
  prompt_ids_.Send(length);
  bundle_->embed
      .Bind({Int64s(memory, names::kInputIds, prompt_ids_.engine_address(), {1, length}),
             Int64s(memory, names::kPositionIds, prompt_positions_.engine_address(), {1, length})},
            {memory.Floats(names::kHidden, prompt_hidden_.get(), {1, length, hidden_size_})})
      .Run();
  kv_.ClearRow(row);
  return {row, length, 0, 0, std::nullopt};
}

// Runs the next passes, and after the last the head. Returns whether all have run. `work`: as in RunPart.
bool Decoder::RunPasses(Prefill* prefill, int64_t work) {
  const Memory& memory = bundle_->memory;
  const bool absolute = schedule_.anchor() == Anchor::kAbsolute;
  int64_t work_left = work;  // in this call
  for (; prefill->segment < bundle_->segments.size(); ++prefill->segment) {
    const std::vector<int64_t>& layers = bundle_->segments[prefill->segment].layers;
    const auto num_layers = static_cast<int64_t>(layers.size());
    const int64_t chunk = std::clamp<int64_t>(work / num_layers, 1, kPrefillChunk);
    const auto cap = absolute ? schedule_.Cap(layers.front()) : std::nullopt;
    const int64_t end = cap ? std::min(*cap, prefill->length) : prefill->length;
    if (prefill->segment >= first_segment_keeping_nothing_) prefill->next = prefill->length - 1;
    while (prefill->next < end) {
      const int64_t size = std::min(chunk, end - prefill->next);
      if (size * num_layers > work_left) return false;
      RunPass(prefill, size, end);
      work_left -= size * num_layers;
    }
    prefill->next = 0;
    prefill->passing.reset();
  }
  bundle_->head
      .Bind({memory.Floats(names::kHidden, Hidden(prompt_hidden_, prefill->length - 1), {1, 1, hidden_size_}),
             Int64s(memory, names::kLast, prompt_last_.engine_address(), {1})},
            {LogitsAt(memory, logits_.engine_address(prefill->row * vocab_size_), {1, vocab_size_})})
      .Run();
  return true;
}

// Runs a segment on the next `size` tokens of a prompt, of which it computes those before `end`.
void Decoder::RunPass(Prefill* prefill, int64_t size, int64_t end) {
  const Memory& memory = bundle_->memory;
  const SegmentEngine& segment = bundle_->segments[prefill->segment];
  if (!kv_.Has(segment.layers.front()) && !prefill->passing) {
    std::vector<int64_t> slots(Size(schedule_.num_layers()));
    for (const int64_t layer : segment.layers) slots[Size(layer)] = end;
    prefill->passing.emplace(memory, bundle_->manifest.model, std::move(slots), 1);
  }
  KvBuffer& kv = prefill->passing ? *prefill->passing : kv_;
  const int64_t start = prefill->next;
  std::byte* hidden = Hidden(prompt_hidden_, start);
  auto total = static_cast<int32_t>(start + size);
  Bindings bound{{memory.Floats(names::kHidden, hidden, {1, size, hidden_size_}),
                  Int64s(memory, names::kPositionIds, prompt_positions_.engine_address(start), {1, size}),
                  SeqlensK(memory, prompt_seqlens_k_.engine_address(total - 1), 1), Total(&total)},
                 {memory.Floats(names::kHiddenOut, hidden, {1, size, hidden_size_})}};
  for (const int64_t layer : segment.layers) kv.Bind(layer, prefill->passing ? 0 : prefill->row, 1, &bound);
  for (const int64_t source : KeySources(bundle_->manifest.model, segment.layers)) kv_.BindRead(source, prefill->row, 1, &bound);
  segment.engine.Bind(bound.inputs, bound.outputs).Run();
  prefill->next = start + size;
}

// Position `index` of hidden states [.., H].
std::byte* Decoder::Hidden(const Block& block, int64_t index) const {
  return block.get() + index * hidden_size_ * static_cast<int64_t>(bundle_->memory.float_size());
}

// Segment `segment` on rows `start ..`, bound when first needed.
const Binding& Decoder::BoundSegment(size_t segment, int64_t start) {
  const Memory& memory = bundle_->memory;
  const int64_t count = rows() - start;
  auto& of_rows = bound_segments_[Size(rows() - 1)];
  if (of_rows.empty()) of_rows.resize(Size(rows()));
  auto& bound = of_rows[Size(start)];
  if (bound.empty()) bound.resize(least_counts_.size());
  if (bound[segment]) return *bound[segment];
  std::byte* hidden = Hidden(hidden_, start);
  Bindings wanted{{memory.Floats(names::kHidden, hidden, {count, 1, hidden_size_}),
                   Int64s(memory, names::kPositionIds, position_ids_.engine_address(start), {count, 1}),
                   SeqlensK(memory, seqlens_k_.engine_address(start), count),
                   Total(memory.on_host() ? &totals_[Size(start)] : &most_totals_[segment])},
                  {memory.Floats(names::kHiddenOut, hidden, {count, 1, hidden_size_})}};
  const std::vector<int64_t>& layers = bundle_->segments[segment].layers;
  for (const int64_t layer : layers) kv_.Bind(layer, start, count, &wanted);
  for (const int64_t source : KeySources(bundle_->manifest.model, layers)) kv_.BindRead(source, start, count, &wanted);
  return bound[segment].emplace(bundle_->segments[segment].engine.Bind(wanted.inputs, wanted.outputs));
}

const Binding& Decoder::BoundEmbed() {
  const Memory& memory = bundle_->memory;
  const int64_t count = rows();
  std::optional<Binding>& bound = bound_embeds_[Size(count - 1)];
  if (bound) return *bound;
  return bound.emplace(bundle_->embed.Bind({Int64s(memory, names::kInputIds, ids_.engine_address(), {count, 1}),
                                            Int64s(memory, names::kPositionIds, position_ids_.engine_address(), {count, 1})},
                                           {memory.Floats(names::kHidden, hidden_.get(), {count, 1, hidden_size_})}));
}

const Binding& Decoder::BoundHead() {
  const Memory& memory = bundle_->memory;
  const int64_t count = rows();
  std::optional<Binding>& bound = bound_heads_[Size(count - 1)];
  if (bound) return *bound;
  return bound.emplace(bundle_->head.Bind({memory.Floats(names::kHidden, hidden_.get(), {count, 1, hidden_size_}),
                                           Int64s(memory, names::kLast, last_.engine_address(), {count})},
                                          {LogitsAt(memory, logits_.engine_address(), {count, vocab_size_})}));
}

void Decoder::MoveRow(int64_t from, int64_t to) {
  positions_[Size(to)] = positions_[Size(from)];
  CopyRow(from, to, positions_[Size(from)].length);
}

void Decoder::CopyRow(int64_t from, int64_t to, int64_t length) {
  kv_.CopyRow(from, to, length);
  bundle_->memory.Copy(logits_.engine_address(to * vocab_size_), logits_.engine_address(from * vocab_size_),
                       Size(vocab_size_) * sizeof(float));
}

}  // namespace skd
