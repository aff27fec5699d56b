// An engine's run on a GPU that decode steps repeat with the same addresses: a CUDA graph from the second time on.
#pragma once

#include <optional>

#include "cuda_stream.h"

namespace skd {

class Replay {
 public:
  explicit Replay(bool graphs) : state_(graphs ? State::kNew : State::kCallsOnly) {}
  // `call`: the same every time. Returns whether a graph was launched; a run that cannot become a graph stays a call.
  bool Run(const cuda_stream::Calls& call);

 private:
  // not recorded the first time, when the engine allocates memory and chooses kernels
  enum class State { kNew, kHasRun, kRecorded, kCallsOnly };

  State state_;
  std::optional<cuda_stream::Graph> graph_;
};

}  // namespace skd
