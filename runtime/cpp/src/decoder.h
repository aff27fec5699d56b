// Prefill and decode step: the climb through the segments, each row computing exactly its own layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bindings.h"
#include "bundle.h"
#include "error.h"
#include "kv_buffer.h"
#include "memory.h"

namespace skd {

// Throws what ended a decode step that had begun: as it is, but for SKD_ERROR_CAPACITY, which would say that all is as it was.
[[noreturn]] void ThrowHalfway(const Error& error);

// One batch on its way: engines bound to one KV buffer. Rows 0 .. rows() - 1 are in use.
//
// The rows active in any segment are a suffix of the batch, because rows are ordered by how far they have come: the largest
// position first, which has the fewest layers. Rows join and leave at any time; both move at most one row a group of equal
// positions.
//
// On a GPU work goes on after Add and Step: Logits waits for it, and so must somebody before the next of them, which writes what
// the GPU may not have read yet.
class Decoder {
 public:
  Decoder(std::shared_ptr<const Bundle> bundle, Schedule schedule, int64_t max_rows, int64_t max_prompt, int64_t max_new);

  int64_t rows() const { return static_cast<int64_t>(positions_.size()); }
  // Run a prompt; what its layers keep, and the logits of its next token, are in the row that is returned. Other rows may have
  // moved: `moved(from, to)` is told of each, in this order.
  template <typename Moved>
  int64_t Add(const int64_t* prompt, int64_t length, Moved moved);
  // Free a row's place.
  template <typename Moved>
  void Remove(int64_t row, Moved moved);
  // Feed one token a row; returns how many layers the deepest row computed. Throws SKD_ERROR_CAPACITY where it has not begun;
  // after anything else rows may be half a step ahead.
  int64_t Step(const int64_t* tokens);
  // The same where what it feeds, and the rows' positions, are there already: the GPU has made them of the step before.
  int64_t Step();
  // [V] float32, of the next token of `row`. Valid until the next call.
  const float* Logits(int64_t row) const;
  // What engines see of a row, and of those after it: the next step's inputs, the last one's logits.
  struct Seen {
    int64_t *ids, *positions;
    int32_t* seqlens_k;
    const float* logits;
  };
  Seen At(int64_t row);

  uint64_t engine_ns() const { return engine_ns_; }
  // Runs of engines in steps that were launches of CUDA graphs.
  uint64_t graph_launches() const { return graph_launches_; }
  uint64_t kv_bytes() const { return kv_.bytes(); }

 private:
  struct Position {
    int64_t length;  // valid tokens
    int64_t t;       // of the next decode step: generated, or absolute as the schedule's anchor says
  };

  void Prefill(int64_t row, const int64_t* prompt, int64_t length);
  void PrefillSegment(const SegmentEngine& segment, int64_t row, int64_t first, int64_t count);
  std::byte* Hidden(const Block& block, int64_t index) const;
  void FindRoute();
  const Binding& Climb(size_t segment, int64_t start);
  const Binding& Embed();
  const Binding& Head();
  void CopyRow(int64_t from, int64_t to);

  std::shared_ptr<const Bundle> bundle_;
  Schedule schedule_;
  int64_t hidden_size_, vocab_size_;
  std::vector<int64_t> least_counts_;  // of each segment
  size_t first_keeping_none_ = 0;      // from this segment on a prompt's last token is all that counts
  KvBuffer kv_;
  std::vector<Position> positions_;
  Block hidden_, prompt_hidden_;  // [rows, H], [max_prompt, H]
  mutable Twin<float> logits_;    // on the host where they have been asked for
  Twin<int64_t> ids_, position_ids_, last_, prompt_ids_, prompt_positions_, prompt_last_;
  Twin<int32_t> seqlens_k_;
  // 0, 1, ..: each pass over a part of a prompt reads its own, so none is rewritten that a pass before may not have read yet
  Twin<int32_t> prompt_seqlens_k_;
  // Read by engines on the host, wherever they run: of each row, the most valid tokens from it on; for a GPU, whose graphs keep
  // what was there when they were recorded, of each segment the most that there can be.
  std::vector<int32_t> totals_, most_totals_;
  // bound when first needed
  std::vector<std::vector<std::vector<std::optional<Binding>>>> climbs_;  // [rows - 1][first row][segment]
  std::vector<std::optional<Binding>> embeds_, heads_;                    // [rows - 1]
  // what a step calls, side by side, because the weights that each call reads have emptied the cache before the next one;
  // found anew when a row computes another count of layers, or rows come and go
  std::vector<Call> route_;
  std::vector<int64_t> counts_, route_counts_;  // layers of each row: in this step, and those that `route_` is for
  uint64_t engine_ns_ = 0, graph_launches_ = 0;
};

template <typename Moved>
int64_t Decoder::Add(const int64_t* prompt, int64_t length, Moved moved) {
  const Position joining{length, schedule_.anchor() == Anchor::kAbsolute ? length : 0};
  int64_t hole = rows();
  positions_.push_back(joining);
  try {
    // the first row of each group that must come later goes to the group's end
    while (hole > 0 && positions_[static_cast<size_t>(hole - 1)].t < joining.t) {
      const int64_t t = positions_[static_cast<size_t>(hole - 1)].t;
      int64_t first = hole - 1;
      while (first > 0 && positions_[static_cast<size_t>(first - 1)].t == t) --first;
      CopyRow(first, hole);
      moved(first, hole);
      hole = first;
    }
    positions_[static_cast<size_t>(hole)] = joining;
    Prefill(hole, prompt, length);
  } catch (...) {
    try {
      Remove(hole, moved);
    } catch (...) {  // a GPU that copies no more: rows are worth nothing, but as many as before
      positions_.pop_back();
    }
    throw;
  }
  return hole;
}

template <typename Moved>
void Decoder::Remove(int64_t row, Moved moved) {
  int64_t hole = row;
  // the last row of each group fills the hole that the group has
  while (hole < rows() - 1) {
    const int64_t t = positions_[static_cast<size_t>(hole + 1)].t;
    int64_t last = hole + 1;
    while (last < rows() - 1 && positions_[static_cast<size_t>(last + 1)].t == t) ++last;
    CopyRow(last, hole);
    moved(last, hole);
    hole = last;
  }
  positions_.pop_back();
}

}  // namespace skd
