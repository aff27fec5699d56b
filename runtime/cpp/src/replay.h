// An engine's run on a GPU that steps repeat, with the same addresses each time: a graph from its second time on.
#pragma once

#include <optional>

#include "cuda_stream.h"

namespace skd {

class Replay {
 public:
  explicit Replay(bool graphs) : state_(graphs ? State::kNew : State::kCalls) {}
  // `call`: the same at every time. Returns whether it was one launch of a graph; a run that cannot be one stays a call.
  bool Run(const cuda_stream::Calls& call);

 private:
  // not recorded at its first time, when the engine allocates and chooses kernels
  enum class State { kNew, kTaken, kRecorded, kCalls };

  State state_;
  std::optional<cuda_stream::Graph> graph_;
};

}  // namespace skd
