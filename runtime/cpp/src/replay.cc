#include "replay.h"

#include <exception>

namespace skd {

bool Replay::Run(const cuda_stream::Calls& call) {
  if (state_ == State::kHasRun) {
    try {
      graph_.emplace(call);
      state_ = State::kRecorded;
    } catch (const std::exception&) {  // nothing has run yet, so the call can be made now, whatever broke the recording
      state_ = State::kCallsOnly;
    }
  }
  if (state_ == State::kRecorded) {
    graph_->Launch();
    return true;
  }
  cuda_stream::Run(call);
  if (state_ == State::kNew) state_ = State::kHasRun;
  return false;
}

}  // namespace skd
