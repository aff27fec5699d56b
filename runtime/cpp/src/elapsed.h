// Elapsed time, for counters.
#pragma once

#include <chrono>
#include <cstdint>

namespace skd {

inline uint64_t NanosecondsSince(std::chrono::steady_clock::time_point began) {
  return static_cast<uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count());
}

}  // namespace skd
