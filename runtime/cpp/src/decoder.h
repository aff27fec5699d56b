// Prefill and decode step: the climb through the segments, each row computing exactly its own layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "bundle.h"
#include "error.h"
#include "kv_buffer.h"
#include "memory.h"

namespace skd {

// Rethrows the exception being handled, which ended `work`, such as "a decode step", halfway. One that callers get as
// SKD_ERROR_CAPACITY, which would mean that rows are unchanged, becomes SKD_ERROR_TARGET.
[[noreturn]] void RethrowAsHalfDone(const std::string& work);

// A batch that is being decoded: engines bound to one KV buffer. Rows 0 .. rows() - 1 are in use.
//
// Rows are ordered by position, the largest first, which has the fewest layers. So the rows active in any segment are a
// suffix of the batch. Rows join and leave at any time; either moves at most one row of each group of equal positions.
//
// On a GPU, what runs a prompt and Step return before their work is done. Logits waits for it. The caller must have waited for a
// step before the next, and for a prompt before the next Add or Begin, which overwrite what the GPU may not have read yet.
class Decoder {
 public:
  Decoder(std::shared_ptr<const Bundle> bundle, Schedule schedule, int64_t max_rows, int64_t max_prompt, int64_t max_new);

  int64_t rows() const { return static_cast<int64_t>(positions_.size()); }
  // Run the prefill of a prompt and return its row, which then has the logits of its next token and what its layers keep.
  // Other rows may have moved: `moved(from, to)` is called for each of them, in order.
  template <typename Moved>
  int64_t Add(const int64_t* prompt, int64_t length, Moved moved);
  // The same in parts, between which rows may step or leave, but none may join: Begin, RunPart until it returns true, Join.
  // Begin returns false if there is no place where the row could wait meanwhile. If RunPart throws, the prefill has ended.
  bool Begin(const int64_t* prompt, int64_t length);
  // Run passes that are worth at most `work` tokens in one layer; returns whether none is left. `work`: one token in all layers,
  // or more.
  bool RunPart(int64_t work);
  template <typename Moved>
  int64_t Join(Moved moved);
  // End the prefill that has begun. On a GPU this waits for its work.
  void Abandon();
  // Free a row's place. `moved`: as for Add. On a GPU throws SKD_ERROR_TARGET, after which rows may be half moved.
  template <typename Moved>
  void Remove(int64_t row, Moved moved);
  // Feed one token a row; returns how many layers the deepest row computed. Throws SKD_ERROR_CAPACITY if the step has not
  // begun; after any other error, rows may be half a step ahead.
  int64_t Step(const int64_t* tokens);
  // The same when the tokens and the rows' positions are in place already: the GPU has made them after the previous step.
  int64_t Step();
  // The logits [V] float32 of the next token of `row`. Valid until the next call.
  const float* Logits(int64_t row) const;
  // Where engines find a row, and the rows after it: the next step's inputs and the last step's logits.
  struct RowView {
    int64_t *ids, *positions;
    int32_t* seqlens_k;
    const float* logits;
  };
  RowView ViewFrom(int64_t row);

  uint64_t engine_ns() const { return engine_ns_; }
  // How many runs of engines in decode steps were launches of CUDA graphs.
  uint64_t graph_launches() const { return graph_launches_; }
  uint64_t kv_bytes() const { return kv_.bytes(); }

 private:
  struct Position {
    int64_t length;  // valid tokens
    int64_t t;       // position of the next decode step, counted from the schedule's anchor
  };

  // A prompt's prefill: passes of each segment over chunks of the prompt. Those of the segments before `segment`, and those of
  // `segment` before the prompt's token `next`, have run.
  struct Prefill {
    int64_t row, length;
    size_t segment;
    int64_t next;
    std::optional<KvBuffer> passing;  // what the layers of `segment` keep of the prompt, if no decode step computes them
  };

  Prefill StartPrefill(int64_t row, const int64_t* prompt, int64_t length);
  bool RunPasses(Prefill* prefill, int64_t work);
  void RunPass(Prefill* prefill, int64_t size, int64_t end);
  Position FirstPosition(int64_t prompt_length) const;
  std::byte* Hidden(const Block& block, int64_t index) const;
  void FindRoute();
  const Binding& BoundSegment(size_t segment, int64_t start);
  const Binding& BoundEmbed();
  const Binding& BoundHead();
  // Copy what `from` keeps, of its first `length` tokens, and its logits.
  void CopyRow(int64_t from, int64_t to, int64_t length);
  void MoveRow(int64_t from, int64_t to);
  // Make room for a row, have `fill(row)` fill it, and return it; other rows are moved as Add says.
  template <typename Fill, typename Moved>
  int64_t Insert(Position joining, Fill fill, Moved moved);
  // Undo an Insert that got as far as `hole`; false if rows cannot be moved back.
  template <typename Moved>
  bool MoveBack(int64_t hole, Moved moved);

  std::shared_ptr<const Bundle> bundle_;
  Schedule schedule_;
  int64_t hidden_size_, vocab_size_;
  std::vector<int64_t> least_counts_;         // of each segment, the least layer count that includes it
  size_t first_segment_keeping_nothing_ = 0;  // and none after it keeps anything: a prompt's last token is enough
  KvBuffer kv_;
  std::vector<Position> positions_;
  std::optional<Prefill> prefill_;       // that has begun, of a row that has not joined
  Block hidden_, prompt_hidden_;         // [rows, H], [max_prompt, H]
  mutable MirroredArray<float> logits_;  // copied to the host only when asked for
  MirroredArray<int64_t> ids_, position_ids_, last_, prompt_ids_, prompt_positions_, prompt_last_;
  MirroredArray<int32_t> seqlens_k_;
  // 0, 1, ..: each pass over a part of a prompt reads its own element, so that none is overwritten before a pass has read it
  MirroredArray<int32_t> prompt_seqlens_k_;
  // total_sequence_length, which engines read from the host wherever they run. totals_[row]: the most valid tokens of this
  // row and those after it. most_totals_[segment]: the most possible, for a GPU, whose graphs keep the value recorded.
  std::vector<int32_t> totals_, most_totals_;
  // bound when first needed
  std::vector<std::vector<std::vector<std::optional<Binding>>>> bound_segments_;  // [rows - 1][first row][segment]
  std::vector<std::optional<Binding>> bound_embeds_, bound_heads_;                // [rows - 1]
  // the calls of a step, contiguous because the weights that a call reads push everything else out of the CPU's cache;
  // rebuilt when a row computes another number of layers, or rows come and go
  std::vector<Call> route_;
  std::vector<int64_t> counts_, route_counts_;  // layers of each row: in this step, and when `route_` was built
  uint64_t engine_ns_ = 0, graph_launches_ = 0;
};

template <typename Moved>
int64_t Decoder::Add(const int64_t* prompt, int64_t length, Moved moved) {
  const auto fill = [&](int64_t row) {
    Prefill prefill = StartPrefill(row, prompt, length);
    RunPasses(&prefill, std::numeric_limits<int64_t>::max());
  };
  return Insert(FirstPosition(length), fill, moved);
}

template <typename Moved>
int64_t Decoder::Join(Moved moved) {
  const int64_t waited = prefill_->row, length = prefill_->length;
  prefill_.reset();
  const auto fill = [&](int64_t row) {
    if (row != waited) CopyRow(waited, row, length);
  };
  return Insert(FirstPosition(length), fill, moved);
}

template <typename Fill, typename Moved>
int64_t Decoder::Insert(Position joining, Fill fill, Moved moved) {
  int64_t hole = rows();
  positions_.push_back(joining);
  try {
    // make room: in each group of equal positions that belongs after the new row, the first row moves behind the last one
    while (hole > 0 && positions_[static_cast<size_t>(hole - 1)].t < joining.t) {
      const int64_t t = positions_[static_cast<size_t>(hole - 1)].t;
      int64_t first = hole - 1;
      while (first > 0 && positions_[static_cast<size_t>(first - 1)].t == t) --first;
      MoveRow(first, hole);
      moved(first, hole);
      hole = first;
    }
    positions_[static_cast<size_t>(hole)] = joining;
    fill(hole);
  } catch (...) {
    if (!MoveBack(hole, moved)) RethrowAsHalfDone("adding a row");
    throw;
  }
  return hole;
}

template <typename Moved>
bool Decoder::MoveBack(int64_t hole, Moved moved) {
  try {
    Remove(hole, moved);
    return true;
  } catch (...) {
    positions_.pop_back();  // the rows' numbers are right again, what they keep is not
    return false;
  }
}

template <typename Moved>
void Decoder::Remove(int64_t row, Moved moved) {
  int64_t hole = row;
  // close the gap: the last row of each group of equal positions fills the hole in or before the group
  while (hole < rows() - 1) {
    const int64_t t = positions_[static_cast<size_t>(hole + 1)].t;
    int64_t last = hole + 1;
    while (last < rows() - 1 && positions_[static_cast<size_t>(last + 1)].t == t) ++last;
    try {
      MoveRow(last, hole);
    } catch (...) {
      RethrowAsHalfDone("moving rows");
    }
    moved(last, hole);
    hole = last;
  }
  positions_.pop_back();
}

}  // namespace skd
