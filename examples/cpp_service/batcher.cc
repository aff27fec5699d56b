#include "batcher.h"

#include <algorithm>
#include <exception>
#include <iostream>
#include <new>
#include <utility>

namespace service {
namespace {

constexpr std::chrono::milliseconds kQueueCheckInterval{50};  // between checks of the whole queue, which may be long
constexpr std::chrono::seconds kRetryInterval{1};             // between attempts to make a session while no row asks for one

}  // namespace

void Mailbox::Put(const News& news) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      news_.push_back(news);
    } catch (const std::bad_alloc&) {
      news_lost_ = true;
    }
  }
  news_arrived_.notify_all();
}

std::vector<Mailbox::News> Mailbox::Take(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  news_arrived_.wait_for(lock, timeout, [this] { return news_lost_ || !news_.empty(); });
  if (news_lost_) throw std::bad_alloc();
  return std::exchange(news_, {});
}

Batcher::Batcher(const skipdecode::Bundle& bundle, const skd_session_options& room, size_t queue_length, Metrics* metrics)
    : bundle_(bundle),
      room_(room),
      queue_length_(queue_length),
      metrics_(metrics),
      session_(std::make_unique<skipdecode::Session>(bundle, room)),
      thread_([this] { Loop(); }) {}

Batcher::~Batcher() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  rows_arrived_.notify_all();
  thread_.join();
}

bool Batcher::Submit(const std::vector<std::shared_ptr<Row>>& rows) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.size() + rows.size() > queue_length_) {
      metrics_->rejected += rows.size();
      return false;
    }
    queue_.insert(queue_.end(), rows.begin(), rows.end());
    metrics_->queued = queue_.size();
  }
  metrics_->accepted += rows.size();
  rows_arrived_.notify_all();
  return true;
}

void Batcher::Loop() {
  for (;;) {
    bool has_rows = true;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto work = [this] { return ending_ || !queue_.empty() || !running_.empty(); };
      if (session_ != nullptr) {
        rows_arrived_.wait(lock, work);
      } else {
        has_rows = rows_arrived_.wait_for(lock, failing_ ? kRetryInterval : std::chrono::seconds(0), work);
      }
      if (ending_ && queue_.empty() && running_.empty()) return;
    }
    if (!has_rows) {
      RenewSession();
      continue;
    }
    try {
      DropAbandoned();
      const bool joined = Admit(), gathers = Gathers();
      if (joined) Step();  // first tokens come alone
      if (!gathers) Step();
    } catch (const std::exception& error) {  // engine failure or out of memory: these rows end, the service goes on
      std::cerr << "decoding failed: " << error.what() << std::endl;
      FailAll();
    }
  }
}

// The session, rebuilt if the last one failed. Throws if that is not possible.
skipdecode::Session& Batcher::GetOrCreateSession() {
  if (session_ != nullptr) return *session_;
  try {
    session_ = std::make_unique<skipdecode::Session>(bundle_, room_);
  } catch (...) {
    failing_ = true;
    throw;
  }
  failing_ = false;
  return *session_;
}

// Does not wait for a row to ask for a session: clients that check /health may send none until it recovers.
void Batcher::RenewSession() {
  const bool reported = failing_;
  try {
    GetOrCreateSession();
  } catch (const std::exception& error) {
    if (!reported) std::cerr << "cannot create a new session, retrying every second: " << error.what() << std::endl;
  }
}

// Run a part of the next prompt, so that running rows wait for no more than that. Returns whether its row has joined.
bool Batcher::Admit() {
  if (!beginning_) Start();
  return beginning_ && RunPart();
}

// Whether rows should not decode yet: none has begun to, and more rows of the same request are to start. Rows that start together
// go on computing the same layers, in the fewest runs of engines.
bool Batcher::Gathers() {
  const auto decodes = [](const auto& running) { return running.second->decodes_; };
  if (running_.empty() || std::any_of(running_.begin(), running_.end(), decodes)) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return beginning_ ||
         (running_.size() < room_.max_rows && !queue_.empty() && queue_.front()->mailbox_ == running_.begin()->second->mailbox_);
}

// Start the next queued row if there is a place. A row that nobody waits for any more never starts.
void Batcher::Start() {
  if (running_.size() == room_.max_rows) return;
  std::shared_ptr<Row> row;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty()) return;
    row = std::move(queue_.front());
    queue_.pop_front();
    metrics_->queued = queue_.size();
  }
  if (CountIfAbandoned(*row, Clock::now())) {
    row->Report(std::nullopt, EndReason::kTimeout);
  } else {
    Begin(row);
  }
  metrics_->running = running_.size();
}

// Begin a row's prompt in the session. A row that cannot join is told why; throws if the session is lost with it.
void Batcher::Begin(const std::shared_ptr<Row>& row) {
  EndReason end = EndReason::kNoSession;
  // Ends the row; returns false if the session is lost with it.
  const auto refuse = [&](EndReason reason, const std::exception& error, bool session_intact) {
    ++metrics_->failed;
    row->Report(std::nullopt, reason);
    const bool kept = session_ == nullptr || session_intact;
    if (kept) std::cerr << "a prompt failed: " << error.what() << std::endl;
    return kept;
  };
  try {
    skipdecode::Session& session = GetOrCreateSession();
    end = EndReason::kFailed;
    const uint64_t id = session.Begin(row->prompt, row->options);
    running_.emplace(id, row);
    beginning_ = id;
  } catch (const skipdecode::Error& error) {
    const bool no_memory = error.code() == SKD_ERROR_CAPACITY;
    // skipdecode.h: a session is unchanged after CAPACITY (and ARGUMENT, which would be a bug here)
    if (!refuse(no_memory ? EndReason::kNoMemory : end, error, no_memory)) throw;
  } catch (const std::exception& error) {  // out of memory outside the library: the session may already have the row
    if (!refuse(EndReason::kNoMemory, error, /*session_intact=*/false)) throw;
  }
}

// Run the next part of the prompt that has begun. Returns whether its row has joined. If there is no memory for it, only its row
// ends; other failures are thrown.
bool Batcher::RunPart() {
  try {
    if (!session_->Prefill()) return false;
    beginning_.reset();
    return true;
  } catch (const skipdecode::Error& error) {
    if (error.code() != SKD_ERROR_CAPACITY) throw;
    std::cerr << "a prompt failed: " << error.what() << std::endl;
    ++metrics_->failed;
    Leave(*beginning_, EndReason::kNoMemory, /*in_session=*/false);
    return false;
  }
}

// Whether nobody waits for this row any more, or its deadline has passed. Counts it if so.
bool Batcher::CountIfAbandoned(const Row& row, Clock::time_point now) {
  if (!row.complete() && !row.cancelled() && now < row.deadline) return false;
  ++(row.complete() ? metrics_->completed : row.cancelled() ? metrics_->cancelled : metrics_->timed_out);
  return true;
}

void Batcher::DropAbandoned() {
  const Clock::time_point now = Clock::now();
  for (auto next = running_.begin(); next != running_.end();) {
    const auto [id, row] = *next++;
    if (CountIfAbandoned(*row, now)) Leave(id, EndReason::kTimeout, /*in_session=*/true);
  }
  if (now < next_queue_check_) return;
  next_queue_check_ = now + kQueueCheckInterval;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto end_if_abandoned = [&](const std::shared_ptr<Row>& row) {
    if (!CountIfAbandoned(*row, now)) return false;
    row->Report(std::nullopt, EndReason::kTimeout);
    return true;
  };
  queue_.erase(std::remove_if(queue_.begin(), queue_.end(), end_if_abandoned), queue_.end());
  metrics_->queued = queue_.size();
}

void Batcher::Step() {
  if (session_ == nullptr) return;
  bool decoded = false;
  for (const skd_event& event : session_->Step()) {
    const std::shared_ptr<Row> row = running_.at(event.row);
    row->Report(event.token, std::nullopt);
    row->decodes_ = event.prefill == 0;
    ++metrics_->tokens;
    if (event.prefill != 0) {
      metrics_->CountFirstToken(std::chrono::duration<double>(Clock::now() - row->arrived).count());
    } else if (!std::exchange(decoded, true)) {
      ++metrics_->decode_steps;
      metrics_->layers += event.layers;
    }
    if (event.finish == SKD_FINISH_NONE) continue;
    ++metrics_->completed;
    Leave(event.row, event.finish == SKD_FINISH_STOP ? EndReason::kStop : EndReason::kLength, /*in_session=*/false);
  }
}

void Batcher::Leave(uint64_t id, EndReason end, bool in_session) {
  if (in_session) session_->Cancel(id);
  running_.at(id)->Report(std::nullopt, end);
  running_.erase(id);
  if (beginning_ == id) beginning_.reset();
  metrics_->running = running_.size();
}

// End all running rows and drop the session, whose state after a failure is unknown. It must be gone before a new one is made,
// because memory may not hold two.
void Batcher::FailAll() noexcept {
  metrics_->failed += running_.size();
  for (const auto& [id, row] : running_) row->Report(std::nullopt, EndReason::kFailed);
  running_.clear();
  beginning_.reset();
  metrics_->running = 0;
  session_.reset();
}

}  // namespace service
