#include "signals.h"

#include <unistd.h>

#include <chrono>
#include <ctime>
#include <optional>

namespace service {
namespace {

using Clock = std::chrono::steady_clock;
constexpr timespec kPollInterval{0, 50'000'000};  // between checks of whether to go on waiting
// signals within it count as one: timeout(1) sends two, to child and group
constexpr std::chrono::seconds kDoubleSignalWindow{1};

[[noreturn]] void EndProcessBy(int signal) {
  std::signal(signal, SIG_DFL);
  sigset_t mask;
  sigemptyset(&mask);
  sigaddset(&mask, signal);
  pthread_sigmask(SIG_UNBLOCK, &mask, nullptr);
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
  sigemptyset(&stop_signals_);
  sigaddset(&stop_signals_, SIGTERM);
  if (!IsIgnored(SIGINT)) sigaddset(&stop_signals_, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop_signals_, nullptr);
  watcher_ = std::thread([this] { Watch(); });
}

Signals::~Signals() {
  ending_ = true;
  watcher_.join();
}

void Signals::RequestStop() {
  if (!stop_requested_.exchange(true)) stop_promise_.set_value();
}

void Signals::Watch() {
  std::optional<Clock::time_point> first;
  while (!ending_) {
    const int signal = sigtimedwait(&stop_signals_, nullptr, &kPollInterval);
    if (signal < 0) continue;
    const Clock::time_point now = Clock::now();
    if (!serving_ || (first && now - *first >= kDoubleSignalWindow)) EndProcessBy(signal);
    if (!first) first = now;
    RequestStop();
  }
}

}  // namespace service
