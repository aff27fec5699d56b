// How SIGTERM and SIGINT end the service.
#pragma once

#include <atomic>
#include <csignal>
#include <future>
#include <thread>

namespace service {

// Before Listen, a signal ends the process at once, as it does by default. After that, the first signal asks the service to
// finish, and one that comes a second or more later ends the process. SIGINT stays ignored if it was ignored at the start.
class Signals {
 public:
  // Construct before all other threads, which inherit the mask that blocks the signals. Throws std::system_error.
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // From now on there is something to finish.
  void Listen() { listening_ = true; }
  // Ask to finish, as the first signal does. The next signal still counts as the first.
  void Ask();
  // Wait until a signal or Ask asks to finish. Call once.
  void Wait() { asked_.get_future().wait(); }

 private:
  void Watch();

  sigset_t ends_{};
  std::atomic<bool> listening_{false}, told_{false}, done_{false};
  std::promise<void> asked_;
  std::thread watcher_;
};

}  // namespace service
