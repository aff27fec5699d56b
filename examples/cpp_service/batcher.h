// One thread that owns the session: rows join as they come, decode together, and leave when they end or nobody waits for them.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <skipdecode/skipdecode.hpp>
#include <string>
#include <thread>
#include <vector>

#include "metrics.h"

namespace service {

using Clock = std::chrono::steady_clock;

// kFailed: the engines did; kLost: they did, and no new session can be made; kRefused: for now there is no memory to decode in.
enum class End { kStop, kLength, kTimeout, kFailed, kLost, kRefused };

// What the rows of one request were given, until the thread that serves its client takes it.
class Mailbox {
 public:
  struct News {
    size_t row;  // its index in the request
    std::optional<int64_t> token;
    std::optional<End> end;  // no more will come
  };

  void Put(const News& news) noexcept;
  // Wait for news of any row, for a moment at most: so that the caller can look after its client. Throws std::bad_alloc where
  // news were lost for want of memory.
  std::vector<News> Take(std::chrono::milliseconds moment);

 private:
  std::mutex mutex_;
  std::condition_variable told_;
  std::vector<News> news_;
  bool lost_ = false;
};

// One row, shared by the thread that serves its client and the batcher.
class Row {
 public:
  Row(std::vector<int64_t> row_prompt, const skd_row_options& row_options, Clock::time_point request_arrived,
      Clock::time_point row_deadline, std::shared_ptr<Mailbox> mailbox, size_t index)
      : prompt(std::move(row_prompt)),
        options(row_options),
        arrived(request_arrived),
        deadline(row_deadline),
        mailbox_(std::move(mailbox)),
        index_(index) {}

  // The client is gone.
  void Cancel() { cancelled_ = true; }
  bool cancelled() const { return cancelled_; }
  // The client has all of its text: a stop string ended it.
  void Complete() { complete_ = true; }
  bool complete() const { return complete_; }

  const std::vector<int64_t> prompt;
  const skd_row_options options;
  const Clock::time_point arrived, deadline;

 private:
  friend class Batcher;
  void Tell(std::optional<int64_t> token, std::optional<End> end) noexcept { mailbox_->Put({index_, token, end}); }

  const std::shared_ptr<Mailbox> mailbox_;
  const size_t index_;
  std::atomic<bool> cancelled_{false}, complete_{false};
};

class Batcher {
 public:
  Batcher(const skipdecode::Bundle& bundle, const skd_session_options& room, size_t queue_length, Metrics* metrics);
  ~Batcher();  // after all rows have ended

  // All of them or none: false where the queue has no room.
  bool Submit(const std::vector<std::shared_ptr<Row>>& rows);
  // Whether no session could be made when that was tried last: at once after a failure, then each second.
  bool failing() const { return failing_; }

 private:
  void Loop();
  skipdecode::Session& TheSession();
  void RenewSession();
  void Admit();
  void Join(const std::shared_ptr<Row>& row);
  bool Abandoned(const Row& row, Clock::time_point now);
  void DropAbandoned();
  void Step();
  void Leave(uint64_t id, End end, bool in_session);
  void FailAll() noexcept;

  const skipdecode::Bundle& bundle_;
  const skd_session_options room_;
  const size_t queue_length_;
  Metrics* const metrics_;
  std::unique_ptr<skipdecode::Session> session_;      // none after a failure, until one can be made
  std::map<uint64_t, std::shared_ptr<Row>> running_;  // by the session's id
  Clock::time_point next_look_{};                     // at whether those in the queue are waited for
  std::atomic<bool> failing_{false};

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::shared_ptr<Row>> queue_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace service
