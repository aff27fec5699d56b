// The rows of one decoder: each row's newest token, when the row ends, which events to deliver.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "decoder.h"
#include "sampling.h"
#include "skipdecode/skipdecode.h"
#include "turn_around.h"

namespace skd {

// Throws SKD_ERROR_CAPACITY if a bundle does not take this many rows.
void CheckRows(const Bundle& bundle, uint64_t rows);

class Session {
 public:
  // Throws SKD_ERROR_CAPACITY, SKD_ERROR_SCHEDULE.
  Session(std::shared_ptr<const Bundle> bundle, const skd_session_options& options);

  int64_t max_rows() const { return max_rows_; }
  // Throws SKD_ERROR_CAPACITY if such a row can never join. `where` names the prompt in the message.
  void Check(const int64_t* prompt, size_t length, const skd_row_options& options, const char* where) const;
  uint64_t Add(const int64_t* prompt, size_t length, const skd_row_options& options);
  // As Add, but the prefill runs in parts, by RunPart.
  uint64_t Begin(const int64_t* prompt, size_t length, const skd_row_options& options);
  // Run passes that are worth a prompt of at most `tokens` tokens; 0: so many that a step between two parts costs little.
  // Returns whether the row has joined, or none has begun. If it throws, the row has left.
  bool RunPart(uint32_t tokens);
  // The first tokens of rows that joined; if there are none, the tokens of one decode step. Empty: no row
  // is left, but for one whose prompt runs in parts.
  const std::vector<skd_event>& Step();
  void Cancel(uint64_t row);
  const float* Logits(uint64_t row) const;
  skd_counters Counters() const;

 private:
  struct Row {
    uint64_t id;
    int64_t token;      // the newest, which the next step feeds
    uint32_t produced;  // tokens so far
    bool first_token_delivered;
    skd_finish finish;
    skd_row_options options;
  };
  // Moves rows as the decoder moves them.
  struct Mover {
    std::vector<Row>* rows;
    void operator()(int64_t from, int64_t to) const { (*rows)[static_cast<size_t>(to)] = (*rows)[static_cast<size_t>(from)]; }
  };

  void PrepareToJoin(const int64_t* prompt, size_t length, const skd_row_options& options);
  Row NewRow(const skd_row_options& options) const { return {next_id_, 0, 0, false, SKD_FINISH_NONE, options}; }
  template <typename Insert>
  void Join(const Row& row, Insert insert);
  size_t Find(uint64_t row) const;
  int64_t DecodeStep();
  void Choose(size_t first, size_t count);
  int64_t ChooseOnHost(const Row& row, int64_t index);
  void RecordToken(Row* row, int64_t token);
  void RemoveEnded();
  void Remove(size_t index);

  std::shared_ptr<const Bundle> bundle_;
  int64_t max_rows_, max_prompt_, max_new_;
  Decoder decoder_;
  Sampler sampler_;                        // chooses tokens on the host
  std::optional<TurnAround> turn_around_;  // chooses them on a GPU
  bool gpu_inputs_current_ = false;        // whether it has each row's newest token, place and settings
  std::vector<Row> rows_;                  // in the decoder's order
  std::optional<Row> beginning_;           // whose prefill runs in parts; it is not in the decoder's order yet
  std::vector<int64_t> tokens_;
  std::vector<skd_event> events_;
  uint64_t next_id_ = 0;
  skd_counters counters_{};
  uint64_t waited_ns_ = 0;  // for a GPU's tokens in decode steps
};

}  // namespace skd
