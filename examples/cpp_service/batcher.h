// The thread that owns the session. Rows join as they come, decode together, and leave when they end or nobody waits for them.
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

// kFailed: the engines failed. kNoSession: they failed, and no new session can be made. kNoMemory: out of memory for now.
enum class EndReason { kStop, kLength, kTimeout, kFailed, kNoSession, kNoMemory };

// Tokens and endings of one request's rows, kept until the thread that serves its client takes them.
class Mailbox {
 public:
  struct News {
    size_t row;  // its index in the request
    std::optional<int64_t> token;
    std::optional<EndReason> end;  // the row's last news
  };

  void Put(const News& news) noexcept;
  // Wait for news of any row, for `timeout` at most, so that the caller can check on its client in between. Throws
  // std::bad_alloc if news was lost because there was no memory for it.
  std::vector<News> Take(std::chrono::milliseconds timeout);

 private:
  std::mutex mutex_;
  std::condition_variable news_arrived_;
  std::vector<News> news_;
  bool news_lost_ = false;
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
  // The client has all of its text, because a stop string ended it.
  void Complete() { complete_ = true; }
  bool complete() const { return complete_; }

  const std::vector<int64_t> prompt;
  const skd_row_options options;
  const Clock::time_point arrived, deadline;

 private:
  friend class Batcher;
  void Report(std::optional<int64_t> token, std::optional<EndReason> end) noexcept { mailbox_->Put({index_, token, end}); }

  const std::shared_ptr<Mailbox> mailbox_;
  const size_t index_;
  bool decodes_ = false;  // the batcher's own
  std::atomic<bool> cancelled_{false}, complete_{false};
};

class Batcher {
 public:
  Batcher(const skipdecode::Bundle& bundle, const skd_session_options& room, size_t queue_length, Metrics* metrics);
  ~Batcher();  // after all rows have ended

  // Queue all rows or none. Returns false if the queue has no room for them.
  bool Submit(const std::vector<std::shared_ptr<Row>>& rows);
  // Whether the last attempt to make a session failed. After a failure it is tried at once, each second and for each row.
  bool failing() const { return failing_; }

 private:
  void Loop();
  skipdecode::Session& GetOrCreateSession();
  void RenewSession();
  bool Admit();
  bool Gathers();
  void Start();
  void Begin(const std::shared_ptr<Row>& row);
  bool RunPart();
  bool CountIfAbandoned(const Row& row, Clock::time_point now);
  void DropAbandoned();
  void Step();
  void Leave(uint64_t id, EndReason end, bool in_session);
  void FailAll() noexcept;

  const skipdecode::Bundle& bundle_;
  const skd_session_options room_;
  const size_t queue_length_;
  Metrics* const metrics_;
  std::unique_ptr<skipdecode::Session> session_;      // null after a failure, until a new one can be made
  std::map<uint64_t, std::shared_ptr<Row>> running_;  // by the session's row id
  std::optional<uint64_t> beginning_;                 // of these, the row whose prompt still runs
  Clock::time_point next_queue_check_{};              // when to check the queue for abandoned rows again
  std::atomic<bool> failing_{false};

  std::mutex mutex_;
  std::condition_variable rows_arrived_;
  std::deque<std::shared_ptr<Row>> queue_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace service
