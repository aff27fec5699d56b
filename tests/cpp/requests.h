// Requests to the service's batcher, on a stand-in for the library.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "active_request.h"
#include "batcher.h"
#include "completion.h"
#include "standin_library.h"

// Whether a condition comes to hold within ten seconds.
template <typename Holds>
bool WaitUntil(const Holds& holds) {
  for (int look = 0; look < 1000 && !holds(); ++look) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return holds();
}

class Requests {
 public:
  explicit Requests(uint32_t rows = 1) {
    library.Reset();
    skd_session_options room = skipdecode::SessionOptions();
    room.max_rows = rows;
    batcher_ = std::make_unique<service::Batcher>(bundle_, room, 8, &metrics);
  }
  // The status that a client gets.
  int Ask() {
    const auto request = Make();
    if (!Submit(*request)) return 429;
    try {
      request->WaitForFirstNews([] { return false; });
    } catch (const service::HttpError& error) {
      return error.status();
    }
    return 200;
  }

  std::unique_ptr<service::ActiveRequest> Make(size_t prompts = 1, std::chrono::seconds patience = std::chrono::seconds(20),
                                               std::chrono::seconds age = std::chrono::seconds(0)) {
    service::Completion completion{};
    completion.prompts.assign(prompts, {1, 2, 3});
    completion.gives_ids = true;
    completion.stream = streams;
    const auto now = service::Clock::now();
    return std::make_unique<service::ActiveRequest>(completion, nullptr, now - age, now + patience, &active_requests_);
  }
  bool Submit(const service::ActiveRequest& request) { return batcher_->Submit(request.rows()); }
  bool failing() const { return batcher_->failing(); }
  // Whether failing() becomes this value within ten seconds.
  bool WaitForFailing(bool failing) const {
    return WaitUntil([&] { return batcher_->failing() == failing; });
  }

  // Wait for the batcher's thread, which counts a row as ended only after its client has the last token.
  void WaitForBatcher() { batcher_.reset(); }

  service::Metrics metrics;
  bool streams = false;

 private:
  const skipdecode::Bundle bundle_ = skipdecode::Bundle::Load("");
  std::atomic<int> active_requests_{0};
  std::unique_ptr<service::Batcher> batcher_;
};

// Whether a number becomes a value within ten seconds.
template <typename Number>
bool WaitForValue(const std::atomic<Number>& metric, Number value) {
  return WaitUntil([&] { return metric == value; });
}

// The next piece of a stream that is not empty.
inline std::string NextNonEmptyPiece(service::ActiveRequest& request) {
  std::string piece;
  while (piece.empty()) piece = request.NextPiece();
  return piece;
}
