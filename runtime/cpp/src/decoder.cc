#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <string>

#include "elapsed.h"

namespace skd {
namespace {

constexpr int64_t kPrefillChunk = 512;  // prompt tokens a pass: bounds the attention scores to chunk x prompt

std::string OfLayer(const char* name, int64_t layer) { return std::string(name) + "." + std::to_string(layer); }

size_t Size(int64_t count) { return static_cast<size_t>(count); }

// Hidden state and KV buffer are read and written in place.
void BindLayer(int64_t layer, float* key, float* value, const std::vector<int64_t>& shape, std::vector<Tensor>* inputs,
               std::vector<Tensor>* outputs) {
  inputs->push_back(Floats(OfLayer("past_key", layer), key, shape));
  inputs->push_back(Floats(OfLayer("past_value", layer), value, shape));
  outputs->push_back(Floats(OfLayer("present_key", layer), key, shape));
  outputs->push_back(Floats(OfLayer("present_value", layer), value, shape));
}

}  // namespace

Decoder::Decoder(std::shared_ptr<const Bundle> bundle, Schedule schedule, int64_t max_rows, int64_t max_prompt, int64_t max_new)
    : bundle_(std::move(bundle)),
      schedule_(std::move(schedule)),
      hidden_size_(bundle_->manifest.model.hidden_size),
      vocab_size_(bundle_->manifest.model.vocab_size),
      max_rows_(max_rows),
      kv_(bundle_->manifest.model, schedule_, max_rows, max_prompt, max_new),
      hidden_(Size(max_rows * hidden_size_)),
      prompt_hidden_(Size(max_prompt * hidden_size_)),
      logits_(Size(max_rows * vocab_size_)),
      ids_(Size(max_rows)),
      position_ids_(Size(max_rows)),
      last_(Size(max_rows)),
      prompt_positions_(Size(max_prompt)),
      seqlens_k_(Size(max_rows)),
      totals_(Size(max_rows)),
      climbs_(Size(max_rows * max_rows)),
      embeds_(Size(max_rows)),
      heads_(Size(max_rows)) {
  positions_.reserve(Size(max_rows));
  counts_.reserve(Size(max_rows));
  route_counts_.reserve(Size(max_rows));
  std::iota(prompt_positions_.begin(), prompt_positions_.end(), 0);
  for (const SegmentEngine& segment : bundle_->segments) least_counts_.push_back(schedule_.LeastCount(segment.layers.front()));
}

int64_t Decoder::Step(const int64_t* tokens) {
  const int64_t count = rows();
  int32_t longest = 0;
  for (int64_t row = count - 1; row >= 0; --row) {
    const int64_t length = positions_[Size(row)].length;
    ids_[Size(row)] = tokens[row];
    position_ids_[Size(row)] = length;
    seqlens_k_[Size(row)] = static_cast<int32_t>(length);
    longest = std::max(longest, static_cast<int32_t>(length + 1));
    totals_[Size(row)] = longest;  // of the rows from this one on
  }
  counts_.clear();
  for (const Position& position : positions_) counts_.push_back(schedule_.LayersAt(position.t));
  if (counts_ != route_counts_) FindRoute();
  const auto began = std::chrono::steady_clock::now();
  for (const Call& call : route_) call.Run();  // nothing lies between two calls, so one clock does for all (50 ns a reading)
  engine_ns_ += NanosecondsSince(began);
  for (Position& position : positions_) {
    ++position.length;
    ++position.t;
  }
  return counts_.back();
}

// A segment runs on the suffix of the rows that compute its layers; counts never fall from row to row.
void Decoder::FindRoute() {
  route_counts_.clear();  // what Bind throws leaves no route that looks found
  route_.assign(1, Embed().call());
  for (size_t segment = 0; segment < least_counts_.size(); ++segment) {
    const auto first = std::lower_bound(counts_.begin(), counts_.end(), least_counts_[segment]);
    if (first != counts_.end()) route_.push_back(Climb(segment, first - counts_.begin()).call());
  }
  route_.push_back(Head().call());
  route_counts_ = counts_;
}

void Decoder::Prefill(int64_t row, const int64_t* prompt, int64_t length) {
  const std::vector<int64_t> shape{1, length, hidden_size_};
  // ONNX Runtime's views are not const, but inputs are not written
  auto* ids = const_cast<int64_t*>(prompt);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  bundle_->embed
      .Bind({Int64s("input_ids", ids, {1, length}), Int64s("position_ids", prompt_positions_.data(), {1, length})},
            {Floats("hidden", prompt_hidden_.data(), shape)})
      .Run();
  for (const SegmentEngine& segment : bundle_->segments) {
    const bool absolute = schedule_.anchor() == Anchor::kAbsolute;
    const std::optional<int64_t> cap = absolute ? schedule_.Cap(segment.layers.front()) : std::nullopt;
    PrefillSegment(segment, row, cap ? std::min(*cap, length) : length);
  }
  int64_t last = 0;
  bundle_->head
      .Bind({Floats("hidden", prompt_hidden_.data() + (length - 1) * hidden_size_, {1, 1, hidden_size_}),
             Int64s("last", &last, {1})},
            {Floats("logits", logits_.data() + row * vocab_size_, {1, vocab_size_})})
      .Run();
}

void Decoder::PrefillSegment(const SegmentEngine& segment, int64_t row, int64_t count) {
  const Model& model = bundle_->manifest.model;
  // a layer that no decode step computes has no slots: its prompt's keys and values live for this call only
  std::vector<std::vector<float>> passing;
  for (int64_t start = 0; start < count; start += kPrefillChunk) {
    const int64_t size = std::min(kPrefillChunk, count - start);
    float* hidden = prompt_hidden_.data() + start * hidden_size_;
    auto valid = static_cast<int32_t>(start + size - 1);
    int32_t total = valid + 1;
    std::vector<Tensor> inputs{Floats("hidden", hidden, {1, size, hidden_size_}),
                               Int64s("position_ids", prompt_positions_.data() + start, {1, size}),
                               Int32s("seqlens_k", &valid, {1}), Int32s("total_sequence_length", &total, {1})};
    std::vector<Tensor> outputs{Floats("hidden_out", hidden, {1, size, hidden_size_})};
    for (size_t i = 0; i < segment.layers.size(); ++i) {
      const int64_t layer = segment.layers[i];
      if (kv_.Has(layer)) {
        BindLayer(layer, kv_.Key(layer, row), kv_.Value(layer, row), kv_.Shape(layer, 1), &inputs, &outputs);
        continue;
      }
      const std::vector<int64_t> shape{1, model.num_kv_heads, count, model.head_size};
      while (passing.size() < 2 * (i + 1)) passing.emplace_back(Size(model.num_kv_heads * count * model.head_size));
      BindLayer(layer, passing[2 * i].data(), passing[2 * i + 1].data(), shape, &inputs, &outputs);
    }
    segment.engine.Bind(inputs, outputs).Run();
  }
}

// Segment `segment` on rows `start ..`, bound when first needed.
const Binding& Decoder::Climb(size_t segment, int64_t start) {
  const int64_t count = rows() - start;
  auto& bound = climbs_[Size((rows() - 1) * max_rows_ + start)];
  if (bound.empty()) bound.resize(least_counts_.size());
  if (bound[segment]) return *bound[segment];
  float* hidden = hidden_.data() + start * hidden_size_;
  std::vector<Tensor> inputs{
      Floats("hidden", hidden, {count, 1, hidden_size_}), Int64s("position_ids", position_ids_.data() + start, {count, 1}),
      Int32s("seqlens_k", seqlens_k_.data() + start, {count}), Int32s("total_sequence_length", totals_.data() + start, {1})};
  std::vector<Tensor> outputs{Floats("hidden_out", hidden, {count, 1, hidden_size_})};
  for (const int64_t layer : bundle_->segments[segment].layers) {
    BindLayer(layer, kv_.Key(layer, start), kv_.Value(layer, start), kv_.Shape(layer, count), &inputs, &outputs);
  }
  return bound[segment].emplace(bundle_->segments[segment].engine.Bind(inputs, outputs));
}

const Binding& Decoder::Embed() {
  const int64_t count = rows();
  std::optional<Binding>& bound = embeds_[Size(count - 1)];
  if (bound) return *bound;
  return bound.emplace(bundle_->embed.Bind(
      {Int64s("input_ids", ids_.data(), {count, 1}), Int64s("position_ids", position_ids_.data(), {count, 1})},
      {Floats("hidden", hidden_.data(), {count, 1, hidden_size_})}));
}

const Binding& Decoder::Head() {
  const int64_t count = rows();
  std::optional<Binding>& bound = heads_[Size(count - 1)];
  if (bound) return *bound;
  return bound.emplace(
      bundle_->head.Bind({Floats("hidden", hidden_.data(), {count, 1, hidden_size_}), Int64s("last", last_.data(), {count})},
                         {Floats("logits", logits_.data(), {count, vocab_size_})}));
}

void Decoder::CopyRow(int64_t from, int64_t to) {
  positions_[Size(to)] = positions_[Size(from)];
  kv_.CopyRow(from, to, positions_[Size(from)].length);
  std::memcpy(logits_.data() + to * vocab_size_, logits_.data() + from * vocab_size_, Size(vocab_size_) * sizeof(float));
}

}  // namespace skd
