// The service's counters, in Prometheus's text format.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

namespace service {

struct Metrics {
  static constexpr std::array<double, 8> kBucketBounds = {0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30};  // seconds

  std::atomic<uint64_t> accepted{0}, rejected{0}, completed{0}, cancelled{0}, timed_out{0}, failed{0};  // rows
  std::atomic<uint64_t> tokens{0}, decode_steps{0}, layers{0};
  std::atomic<uint64_t> queued{0}, running{0};                                        // at this moment
  std::array<std::atomic<uint64_t>, kBucketBounds.size() + 1> first_token_buckets{};  // rows, by time from arrival to first token
  std::atomic<uint64_t> first_token_sum_us{0};

  void CountFirstToken(double seconds);
  std::string Text() const;
};

}  // namespace service
