#include "turn_around.h"

#include <algorithm>
#include <limits>

namespace skd {

cuda_driver::Kernel* TurnAroundKernel() {
  static cuda_driver::Module* const module = cuda_stream::LoadModule(kTurnAroundPtx);
  static cuda_driver::Kernel* const kernel = cuda_stream::KernelOf(module, "skd_turnaround_kernel");
  return kernel;
}

TurnAround::TurnAround(const Memory& memory, int64_t rows, int64_t vocab_size)
    : vocab_size_(vocab_size),
      sampling_(memory, rows),
      row_ids_(memory, rows),
      steps_(memory, rows),
      finished_(memory.Allocate(sizeof(int32_t) * static_cast<size_t>(rows))),
      tokens_(memory.AllocateHost(sizeof(int64_t) * static_cast<size_t>(rows))) {}

void TurnAround::SetRow(int64_t row, const skd_row_options& options, uint32_t chosen) {
  constexpr uint32_t kMaxTopK = std::numeric_limits<int32_t>::max();  // no vocabulary is larger
  sampling_[row] = {options.do_sample != 0 ? 1 : 0, static_cast<int32_t>(std::min(options.top_k, kMaxTopK)), options.temperature,
                    options.top_p, options.seed};
  row_ids_[row] = options.generator_row;
  steps_[row] = static_cast<int32_t>(chosen);
}

void TurnAround::Send(int64_t first, int64_t count) {
  sampling_.Send(count, first);
  row_ids_.Send(count, first);
  steps_.Send(count, first);
}

const int64_t* TurnAround::Run(const Decoder::RowView& rows, int64_t first, int64_t count) {
  SkdTurnaround state{};
  state.rows = static_cast<int32_t>(count);
  state.vocabulary = static_cast<int32_t>(vocab_size_);
  state.kept_steps = 1;
  state.logits = rows.logits;
  state.sampling = reinterpret_cast<SkdSampling*>(sampling_.engine_address(first));
  state.row_ids = reinterpret_cast<int64_t*>(row_ids_.engine_address(first));
  state.steps = reinterpret_cast<int32_t*>(steps_.engine_address(first));
  state.input_ids = rows.ids;
  state.position_ids = rows.positions;
  state.seqlens_k = rows.seqlens_k;
  state.finished = reinterpret_cast<int32_t*>(finished_.get());
  state.tokens = reinterpret_cast<int64_t*>(tokens_.get());
  cuda_stream::Launch(TurnAroundKernel(), static_cast<unsigned>(count), SKD_TURNAROUND_THREADS, &state);
  done_.Record();
  done_.Wait();
  return state.tokens;
}

}  // namespace skd
