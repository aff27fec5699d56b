// Tokens chosen on the GPU, where the logits are, which also makes the next step's inputs of them: plugins/turnaround.
#pragma once

#include <cstdint>

#include "cuda_stream.h"
#include "decoder.h"
#include "memory.h"
#include "skipdecode/skipdecode.h"
#include "turnaround/turnaround.h"

namespace skd {

extern const char kTurnAroundPtx[];  // of plugins/turnaround/turnaround.ptx

// The kernel, which the driver compiles for the GPU at hand when it is first asked for. Throws SKD_ERROR_TARGET.
cuda_driver::Kernel* TurnAroundKernel();

// For the rows of one decoder.
class TurnAround {
 public:
  // `rows`: the most there can be. `memory`: the GPU's; must outlive this.
  TurnAround(const Memory& memory, int64_t rows, int64_t vocab_size);

  // How `row` chooses, and how many tokens it has chosen; `Send` lets the GPU know of `count` rows from `first` on.
  void Tell(int64_t row, const skd_row_options& options, uint32_t chosen);
  void Send(int64_t first, int64_t count);
  // Choose the next tokens of `count` rows from `first` on, all of which the GPU knows of; returns them when they are here, and
  // everything that was asked for before is done. The GPU counts on by itself: rows that stay in their places need no Send.
  const int64_t* Run(const Decoder::Seen& seen, int64_t first, int64_t count);

 private:
  int64_t vocab_size_;
  Twin<SkdSampling> sampling_;
  Twin<int64_t> row_ids_;
  Twin<int32_t> steps_;
  Block finished_;  // zeros: rows that end are taken out
  Block tokens_;    // on the host
  cuda_stream::Event done_;
};

}  // namespace skd
