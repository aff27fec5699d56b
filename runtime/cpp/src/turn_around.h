// Chooses tokens on the GPU, where the logits are, and makes the next step's inputs from them (plugins/turnaround).
#pragma once

#include <cstdint>

#include "cuda_stream.h"
#include "decoder.h"
#include "memory.h"
#include "skipdecode/skipdecode.h"
#include "turnaround/turnaround.h"

namespace skd {

extern const char kTurnAroundPtx[];  // the text of plugins/turnaround/turnaround.ptx

// The kernel, which the driver compiles for this GPU at the first call. Throws SKD_ERROR_TARGET.
cuda_driver::Kernel* TurnAroundKernel();

// For the rows of one decoder.
class TurnAround {
 public:
  // `rows`: the most that there can be. `memory`: the GPU's, which must outlive this.
  TurnAround(const Memory& memory, int64_t rows, int64_t vocab_size);

  // SetRow notes how `row` chooses and how many tokens it has chosen so far; Send copies that to the GPU for `count` rows, from
  // `first` on.
  void SetRow(int64_t row, const skd_row_options& options, uint32_t chosen);
  void Send(int64_t first, int64_t count);
  // Choose the next tokens of `count` rows, from `first` on, all of which must have been sent. Returns them on the host, when
  // all work put on the stream so far is done. The GPU counts on by itself: rows that keep their places need no Send.
  const int64_t* Run(const Decoder::RowView& rows, int64_t first, int64_t count);

 private:
  int64_t vocab_size_;
  MirroredArray<SkdSampling> sampling_;
  MirroredArray<int64_t> row_ids_;
  MirroredArray<int32_t> steps_;
  Block finished_;  // always zeros, because rows that end are removed
  Block tokens_;    // on the host
  cuda_stream::Event done_;
};

}  // namespace skd
