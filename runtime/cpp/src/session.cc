#include "session.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "elapsed.h"
#include "error.h"
#include "manifest_check.h"
#include "token_ids.h"

namespace skd {
namespace {

// Tokens of a prompt's part. On a CPU a step costs as much as a prompt of 3 (int4) to 10 tokens (fp32). A GPU computes hundreds
// of tokens in the time in which it reads the weights.
constexpr uint32_t kPartTokens = 64, kGpuPartTokens = 512;

int64_t MaxRows(const Bundle& bundle, const skd_session_options& options) {
  CheckRows(bundle, options.max_rows);
  return options.max_rows;
}

int64_t MaxPromptTokens(const Bundle& bundle, const skd_session_options& options) {
  const int64_t length = bundle.manifest.limits.max_length;
  const int64_t prompt = options.max_prompt_tokens == 0 ? std::max<int64_t>(length / 2, 1) : options.max_prompt_tokens;
  if (prompt >= length) {
    throw CapacityError(std::to_string(prompt) + " prompt tokens leave no room in the bundle's " + std::to_string(length),
                        "choose fewer, or export with a larger --max-length", "max_prompt_tokens");
  }
  return prompt;
}

int64_t MaxNewTokens(const Bundle& bundle, const skd_session_options& options) {
  const int64_t length = bundle.manifest.limits.max_length, left = length - MaxPromptTokens(bundle, options);
  const int64_t chosen = options.max_new_tokens == 0 ? left : options.max_new_tokens;
  if (chosen > left) {
    const std::string shorter = chosen < length ? ", max_prompt_tokens up to " + std::to_string(length - chosen) : "";
    throw CapacityError(std::to_string(chosen) + " new tokens: prompts leave " + std::to_string(left),
                        "choose fewer" + shorter + ", or export with a larger --max-length", "max_new_tokens");
  }
  return chosen;
}

Schedule ScheduleFor(const Manifest& manifest, const skd_session_options& options) {
  const Schedule& own = manifest.schedule;
  if (options.full_depth != 0) return Schedule::FullDepth(manifest.model.num_layers);
  if (options.layers == nullptr) return own;
  Schedule given(own.num_layers(), own.warmup_layers(), {options.layers, options.layers + options.num_positions}, own.anchor());
  const auto refuse = [](const char* what) {
    throw Error(SKD_ERROR_SCHEDULE, what, "choose other layer counts, or export the model with them");
  };
  if (CutsThroughSegment(given, manifest.segments)) refuse("the schedule cuts through a segment of this bundle");
  if (SkipsSource(given, manifest.model)) refuse("the schedule skips layers whose keys and values later layers read");
  return given;
}

}  // namespace

void CheckRows(const Bundle& bundle, uint64_t rows) {
  const auto most = static_cast<uint64_t>(bundle.manifest.limits.max_batch);
  if (rows >= 1 && rows <= most) return;
  throw CapacityError(std::to_string(rows) + " rows: the bundle takes 1.." + std::to_string(most),
                      rows == 0 ? "choose 1 or more" : "choose fewer, or export with a larger --max-batch", "max_rows");
}

Session::Session(std::shared_ptr<const Bundle> bundle, const skd_session_options& options)
    : bundle_(std::move(bundle)),
      max_rows_(MaxRows(*bundle_, options)),
      max_prompt_(MaxPromptTokens(*bundle_, options)),
      max_new_(MaxNewTokens(*bundle_, options)),
      decoder_(bundle_, ScheduleFor(bundle_->manifest, options), max_rows_, max_prompt_, max_new_) {
  if (!bundle_->memory.on_host()) turn_around_.emplace(bundle_->memory, max_rows_, bundle_->manifest.model.vocab_size);
  rows_.reserve(static_cast<size_t>(max_rows_));
  tokens_.resize(static_cast<size_t>(max_rows_));
  events_.reserve(static_cast<size_t>(max_rows_));
}

void Session::Check(const int64_t* prompt, size_t length, const skd_row_options& options, const char* where) const {
  if (length == 0) throw CapacityError("is empty", "give at least one token", where);
  if (length > static_cast<size_t>(max_prompt_)) {
    throw CapacityError(std::to_string(length) + " tokens: the session takes " + std::to_string(max_prompt_),
                        "shorten the prompt, or ask for a larger max_prompt_tokens", where);
  }
  if (options.max_new_tokens < 1 || options.max_new_tokens > max_new_) {
    throw CapacityError(std::to_string(options.max_new_tokens) + " new tokens: the session takes 1.." + std::to_string(max_new_),
                        "choose another skd_row_options.max_new_tokens", where);
  }
  CheckIds(bundle_->manifest.model, prompt, length, where);
  CheckSampling(options);
}

uint64_t Session::Add(const int64_t* prompt, size_t length, const skd_row_options& options) {
  PrepareToJoin(prompt, length, options);
  const auto began = std::chrono::steady_clock::now();
  Join(NewRow(options), [&] { return decoder_.Add(prompt, static_cast<int64_t>(length), Mover{&rows_}); });
  counters_.prefill_ns += NanosecondsSince(began);
  return next_id_++;
}

uint64_t Session::Begin(const int64_t* prompt, size_t length, const skd_row_options& options) {
  PrepareToJoin(prompt, length, options);
  const auto began = std::chrono::steady_clock::now();
  if (!decoder_.Begin(prompt, static_cast<int64_t>(length))) return Add(prompt, length, options);
  beginning_ = NewRow(options);
  counters_.prefill_ns += NanosecondsSince(began);
  return next_id_++;
}

bool Session::RunPart(uint32_t tokens) {
  if (!beginning_) return true;
  const auto began = std::chrono::steady_clock::now();
  const Row row = *std::exchange(beginning_, std::nullopt);
  const int64_t part = tokens > 0 ? tokens : bundle_->memory.on_host() ? kPartTokens : kGpuPartTokens;
  const bool complete = decoder_.RunPart(part * bundle_->manifest.model.num_layers);
  if (complete) {
    Join(row, [&] { return decoder_.Join(Mover{&rows_}); });
  } else {
    beginning_ = row;
  }
  counters_.prefill_ns += NanosecondsSince(began);
  return complete;
}

// Checks all that can be checked before a prompt runs.
void Session::PrepareToJoin(const int64_t* prompt, size_t length, const skd_row_options& options) {
  Check(prompt, length, options, "prompt");
  if (beginning_) throw Error(SKD_ERROR_ARGUMENT, "another prompt has begun", "run its parts first", "prompt");
  if (decoder_.rows() == max_rows_) {
    throw CapacityError("all " + std::to_string(max_rows_) + " rows are in use",
                        "wait until one ends, or ask for a larger max_rows", "prompt");
  }
  // now, because a failure later would leave a row without its token
  if (!turn_around_) sampler_.Prepare(bundle_->manifest.model.vocab_size, options);
}

// Takes in a row that `insert` puts among the decoder's, and chooses its first token.
template <typename Insert>
void Session::Join(const Row& row, Insert insert) {
  rows_.emplace_back();
  gpu_inputs_current_ = false;
  size_t index = 0;
  try {
    index = static_cast<size_t>(insert());
  } catch (...) {
    rows_.pop_back();
    throw;
  }
  rows_[index] = row;
  try {
    if (turn_around_) {
      turn_around_->SetRow(static_cast<int64_t>(index), row.options, 0);
      turn_around_->Send(static_cast<int64_t>(index), 1);
    }
    Choose(index, 1);
  } catch (...) {
    Remove(index);
    throw;
  }
}

const std::vector<skd_event>& Session::Step() {
  events_.clear();
  const auto full_depth = static_cast<uint32_t>(bundle_->manifest.model.num_layers);
  for (Row& row : rows_) {
    if (row.first_token_delivered) continue;
    row.first_token_delivered = true;
    events_.push_back({row.id, row.token, full_depth, 1, row.finish});
  }
  if (events_.empty() && !rows_.empty()) {
    const auto began = std::chrono::steady_clock::now();
    const auto layers = static_cast<uint32_t>(DecodeStep());
    const auto stepped = std::chrono::steady_clock::now();
    try {
      Choose(0, rows_.size());
    } catch (...) {
      RethrowAsHalfDone("a decode step");
    }
    if (turn_around_) waited_ns_ += NanosecondsSince(stepped);
    for (const Row& row : rows_) events_.push_back({row.id, row.token, layers, 0, row.finish});
    ++counters_.decode_steps;
    counters_.decode_ns += NanosecondsSince(began);
  }
  RemoveEnded();
  return events_;
}

void Session::Cancel(uint64_t row) {
  if (beginning_ && beginning_->id == row) {
    beginning_.reset();
    decoder_.Abandon();
  } else {
    Remove(Find(row));
  }
}

const float* Session::Logits(uint64_t row) const { return decoder_.Logits(static_cast<int64_t>(Find(row))); }

skd_counters Session::Counters() const {
  skd_counters counters = counters_;
  counters.decode_engine_ns = decoder_.engine_ns() + waited_ns_;
  counters.kv_bytes = decoder_.kv_bytes();
  counters.graph_launches = decoder_.graph_launches();
  return counters;
}

size_t Session::Find(uint64_t row) const {
  const auto found = std::find_if(rows_.begin(), rows_.end(), [row](const Row& each) { return each.id == row; });
  if (found == rows_.end())
    throw CapacityError("row " + std::to_string(row) + " is not in this session", "name one that has not ended");
  return static_cast<size_t>(found - rows_.begin());
}

// Runs one decode step of all rows; returns how many layers the deepest row computed.
int64_t Session::DecodeStep() {
  if (gpu_inputs_current_) return decoder_.Step();
  std::transform(rows_.begin(), rows_.end(), tokens_.begin(), [](const Row& row) { return row.token; });
  if (turn_around_) {
    for (size_t i = 0; i < rows_.size(); ++i) turn_around_->SetRow(static_cast<int64_t>(i), rows_[i].options, rows_[i].produced);
    turn_around_->Send(0, static_cast<int64_t>(rows_.size()));
  }
  const int64_t layers = decoder_.Step(tokens_.data());
  gpu_inputs_current_ = turn_around_.has_value();
  return layers;
}

// Chooses the next tokens of `count` rows, from `first` on, from their logits.
void Session::Choose(size_t first, size_t count) {
  const auto start = static_cast<int64_t>(first);
  const int64_t* chosen =
      turn_around_ ? turn_around_->Run(decoder_.ViewFrom(start), start, static_cast<int64_t>(count)) : nullptr;
  for (size_t index = first; index < first + count; ++index) {
    Row* row = &rows_[index];
    RecordToken(row, chosen != nullptr ? chosen[index - first] : ChooseOnHost(*row, static_cast<int64_t>(index)));
  }
}

int64_t Session::ChooseOnHost(const Row& row, int64_t index) {
  const double draw = Uniform(row.options.seed, row.options.generator_row, row.produced);
  return sampler_.Choose(decoder_.Logits(index), bundle_->manifest.model.vocab_size, row.options, draw);
}

void Session::RecordToken(Row* row, int64_t token) {
  row->token = token;
  ++row->produced;
  ++counters_.tokens;
  const auto& ends = bundle_->manifest.model.eos_token_ids;
  if (row->options.ignore_eos == 0 && std::find(ends.begin(), ends.end(), token) != ends.end()) {
    row->finish = SKD_FINISH_STOP;
  } else if (row->produced == row->options.max_new_tokens) {
    row->finish = SKD_FINISH_LENGTH;
  }
}

void Session::RemoveEnded() {
  for (size_t index = rows_.size(); index-- > 0;) {
    if (rows_[index].finish != SKD_FINISH_NONE) Remove(index);  // all have their event by now
  }
}

void Session::Remove(size_t index) {
  gpu_inputs_current_ = false;
  decoder_.Remove(static_cast<int64_t>(index), Mover{&rows_});
  rows_.pop_back();
}

}  // namespace skd
