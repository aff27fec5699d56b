// Threads that serve clients, each one at a time.
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

// httplib's own pool cannot be given up where the system starts no more threads, and takes more clients than it has threads.
class Workers {
 public:
  // `serve` gets each client's socket, and throws nothing. Throws std::system_error where threads cannot be started.
  Workers(size_t count, std::function<void(int)> serve);
  ~Workers();  // when all clients have been served
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Whether there is a thread for another client, within `moment`.
  bool WaitForFree(std::chrono::milliseconds moment);
  void Serve(int client);

 private:
  void Loop();
  void End();

  const std::function<void(int)> serve_;
  std::mutex mutex_;
  std::condition_variable came_, free_;
  std::deque<int> clients_;  // that no thread has taken yet
  size_t idle_ = 0;          // threads that wait for a client
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace service
