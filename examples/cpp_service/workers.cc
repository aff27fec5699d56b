#include "workers.h"

#include <utility>

namespace service {

Workers::Workers(size_t count, std::function<void(int)> serve) : serve_(std::move(serve)) {
  threads_.reserve(count);
  try {
    while (threads_.size() < count) threads_.emplace_back([this] { Loop(); });
  } catch (...) {
    End();
    throw;
  }
}

Workers::~Workers() { End(); }

bool Workers::WaitForFree(std::chrono::milliseconds moment) {
  std::unique_lock<std::mutex> lock(mutex_);
  return free_.wait_for(lock, moment, [this] { return idle_ > clients_.size(); });
}

void Workers::Serve(int client) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    clients_.push_back(client);
  }
  came_.notify_one();
}

void Workers::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ++idle_;
    free_.notify_one();
    came_.wait(lock, [this] { return ending_ || !clients_.empty(); });
    --idle_;
    if (clients_.empty()) return;
    const int client = clients_.front();
    clients_.pop_front();
    lock.unlock();
    serve_(client);
    lock.lock();
  }
}

void Workers::End() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  came_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

}  // namespace service
