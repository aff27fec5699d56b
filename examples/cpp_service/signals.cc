#include "signals.h"

#include <unistd.h>

#include <chrono>
#include <ctime>
#include <optional>

namespace service {
namespace {

using Clock = std::chrono::steady_clock;
constexpr timespec kMoment{0, 50'000'000};   // between checks of whether to go on waiting
constexpr std::chrono::seconds kOneWish{1};  // signals within it count as one: timeout(1) sends two, to child and group

[[noreturn]] void EndBy(int signal) {
  std::signal(signal, SIG_DFL);
  sigset_t it;
  sigemptyset(&it);
  sigaddset(&it, signal);
  pthread_sigmask(SIG_UNBLOCK, &it, nullptr);
  std::raise(signal);
  _exit(128 + signal);  // for a container's first process, which no signal ends by default
}

// A shell ignores SIGINT for what its scripts start in the background.
bool IsIgnored(int signal) {
  struct sigaction now {};
  return sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}

}  // namespace

Signals::Signals() {
  sigemptyset(&ends_);
  sigaddset(&ends_, SIGTERM);
  if (!IsIgnored(SIGINT)) sigaddset(&ends_, SIGINT);
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
  std::optional<Clock::time_point> first;
  while (!done_) {
    const int signal = sigtimedwait(&ends_, nullptr, &kMoment);
    if (signal < 0) continue;
    const Clock::time_point now = Clock::now();
    if (!listening_ || (first && now - *first >= kOneWish)) EndBy(signal);
    if (!first) first = now;
    Ask();
  }
}

}  // namespace service
