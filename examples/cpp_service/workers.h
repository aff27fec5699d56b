// Threads that serve clients, one client each at a time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace service {

// Used instead of httplib's pool, which cannot be torn down if the system refuses it a thread, and which takes more clients
// than it has threads.
class Workers {
 public:
  // `serve` gets each client's socket and must not throw. Throws std::system_error if threads cannot be started.
  Workers(size_t count, std::function<void(int)> serve);
  ~Workers();  // waits until all clients have been served
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Whether a thread is free for another client; waits for one for `timeout` at most.
  bool WaitForIdleThread(std::chrono::milliseconds timeout);
  void Serve(int client);

 private:
  void Loop();
  void End();

  const std::function<void(int)> serve_;
  std::mutex mutex_;
  std::condition_variable client_arrived_, thread_idle_;
  std::deque<int> waiting_clients_;  // not yet taken by a thread
  size_t num_idle_ = 0;              // threads that wait for a client
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace service
