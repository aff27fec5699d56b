// How SIGTERM and SIGINT end the service.
#pragma once

#include <atomic>
#include <csignal>
#include <future>
#include <thread>

namespace service {

// Before MarkServing, a signal ends the process at once, as it does by default. After that, the first signal asks the service to
// finish, and one that comes a second or more later ends the process. SIGINT stays ignored if it was ignored at the start.
class Signals {
 public:
  // Construct before all other threads, which inherit the mask that blocks the signals. Throws std::system_error.
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // From now on there is something to finish.
  void MarkServing() { serving_ = true; }
  // Ask to finish, as the first signal does. The next signal still counts as the first.
  void RequestStop();
  // Wait until a signal or RequestStop asks to finish. Call once.
  void Wait() { stop_promise_.get_future().wait(); }

 private:
  void Watch();

  sigset_t stop_signals_{};
  std::atomic<bool> serving_{false}, stop_requested_{false}, ending_{false};
  std::promise<void> stop_promise_;
  std::thread watcher_;
};

}  // namespace service
