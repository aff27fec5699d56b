#include "signals.h"

#include <unistd.h>

#include <ctime>

namespace service {
namespace {

constexpr timespec kMoment{0, 50'000'000};  // between looks at whether there is anything to wait for

[[noreturn]] void EndBy(int signal) {
  std::signal(signal, SIG_DFL);
  sigset_t it;
  sigemptyset(&it);
  sigaddset(&it, signal);
  pthread_sigmask(SIG_UNBLOCK, &it, nullptr);
  std::raise(signal);
  _exit(128 + signal);  // a container's first process, whom no signal ends by itself
}

}  // namespace

Signals::Signals() {
  sigemptyset(&ends_);
  sigaddset(&ends_, SIGTERM);
  sigaddset(&ends_, SIGINT);
  pthread_sigmask(SIG_BLOCK, &ends_, nullptr);
  watcher_ = std::thread([this] { Watch(); });
}

Signals::~Signals() {
  done_ = true;
  watcher_.join();
}

void Signals::Ask() {
  if (!told_.exchange(true)) asked_.set_value();
}

void Signals::Watch() {
  while (!done_) {
    const int signal = sigtimedwait(&ends_, nullptr, &kMoment);
    if (signal < 0) continue;
    if (!listening_ || told_) EndBy(signal);
    Ask();
  }
}

}  // namespace service
