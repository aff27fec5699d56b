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

bool Workers::WaitForIdleThread(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return thread_idle_.wait_for(lock, timeout, [this] { return num_idle_ > waiting_clients_.size(); });
}

void Workers::Serve(int client) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_clients_.push_back(client);
  }
  client_arrived_.notify_one();
}

void Workers::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ++num_idle_;
    thread_idle_.notify_one();
    client_arrived_.wait(lock, [this] { return ending_ || !waiting_clients_.empty(); });
    --num_idle_;
    if (waiting_clients_.empty()) return;
    const int client = waiting_clients_.front();
    waiting_clients_.pop_front();
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
  client_arrived_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

}  // namespace service
