// SIGTERM and SIGINT: what they ask for, and when.
#pragma once

#include <atomic>
#include <csignal>
#include <future>
#include <thread>

namespace service {

// Until there is something to finish a signal ends the process at once, as it would by itself; then the first asks to finish,
// and one that comes a second or more after it ends the process. SIGINT stays ignored where it was.
class Signals {
 public:
  // Before all other threads, which inherit that signals do not come to them. Throws std::system_error.
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // From now on there is something to finish.
  void Listen() { listening_ = true; }
  // To finish, as the first signal does; the next signal is the first all the same.
  void Ask();
  // Until somebody does; once.
  void Wait() { asked_.get_future().wait(); }

 private:
  void Watch();

  sigset_t ends_{};
  std::atomic<bool> listening_{false}, told_{false}, done_{false};
  std::promise<void> asked_;
  std::thread watcher_;
};

}  // namespace service
