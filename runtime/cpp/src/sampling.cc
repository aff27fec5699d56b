#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "error.h"

namespace skd {
namespace {

// In lanes, which compilers turn into vector instructions: std::max_element takes 8 us for 8192 logits.
float Largest(const float* values, int64_t count) {
  constexpr int64_t kLanes = 16;
  float best[kLanes];
  std::fill(best, best + kLanes, -std::numeric_limits<float>::infinity());
  for (; count >= kLanes; count -= kLanes, values += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) best[lane] = values[lane] > best[lane] ? values[lane] : best[lane];
  }
  for (int64_t i = 0; i < count; ++i) best[0] = values[i] > best[0] ? values[i] : best[0];
  return *std::max_element(best, best + kLanes);
}

// The first of the largest; only the block that has it is searched one by one.
int64_t Likeliest(const float* logits, int64_t count) {
  constexpr int64_t kBlock = 512;
  float most = -std::numeric_limits<float>::infinity();
  int64_t first = 0;
  for (int64_t start = 0; start < count; start += kBlock) {
    const float largest = Largest(logits + start, std::min(kBlock, count - start));
    if (largest > most) {
      most = largest;
      first = start;
    }
  }
  const float* end = logits + std::min(first + kBlock, count);
  const float* found = std::find(logits + first, end, most);
  return found == end ? 0 : found - logits;  // nothing but NaN: any token is as good
}

}  // namespace

void CheckSampling(const skd_row_options& options) {
  if (options.do_sample == 0) return;
  const auto fail = [](const char* where, double value, const char* remedy) {
    throw CapacityError(std::to_string(value) + " is out of range", remedy, where);
  };
  if (!(options.temperature > 0)) fail("temperature", options.temperature, "choose a number above 0");
  if (!(options.top_p > 0 && options.top_p <= 1)) fail("top_p", options.top_p, "choose a number in (0, 1]");
}

double Uniform(uint64_t seed, uint64_t row, uint64_t step) {
  uint64_t value = seed * 0x9E3779B97F4A7C15U + (row << 32U) + step;
  for (int i = 0; i < 2; ++i) {
    value += 0x9E3779B97F4A7C15U;
    value = (value ^ (value >> 30U)) * 0xBF58476D1CE4E5B9U;
    value = (value ^ (value >> 27U)) * 0x94D049BB133111EBU;
    value ^= value >> 31U;
  }
  return static_cast<double>(value >> 11U) * 0x1p-53;
}

void Sampler::Prepare(int64_t vocab_size, const skd_row_options& options) {
  if (options.do_sample == 0) return;
  order_.reserve(static_cast<size_t>(vocab_size));
  mass_.reserve(static_cast<size_t>(vocab_size));
}

int64_t Sampler::Choose(const float* logits, int64_t vocab_size, const skd_row_options& options, uint64_t step) {
  if (options.do_sample != 0) return Sample(logits, vocab_size, options, step);
  return Likeliest(logits, vocab_size);
}

int64_t Sampler::Sample(const float* logits, int64_t vocab_size, const skd_row_options& options, uint64_t step) {
  // sorting a whole vocabulary takes longer than a decode step; the choice is nearly always among the first
  constexpr size_t kFirst = 256, kGrowth = 16;
  const auto count = static_cast<size_t>(vocab_size);
  const size_t most = options.top_k == 0 ? count : std::min<size_t>(options.top_k, count);
  const auto top = static_cast<double>(logits[Likeliest(logits, vocab_size)]);
  const auto mass = [&](size_t id) { return std::exp((static_cast<double>(logits[id]) - top) / options.temperature); };
  double total = 0.0;
  for (size_t id = 0; options.top_k == 0 && id < count; ++id) total += mass(id);
  const double draw = Uniform(options.seed, options.generator_row, step);
  order_.resize(count);
  std::iota(order_.begin(), order_.end(), 0);
  for (size_t size = options.top_k == 0 ? std::min(kFirst, most) : most;; size = std::min(kGrowth * size, most)) {
    const auto likelier = [logits](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
    std::partial_sort(order_.begin(), order_.begin() + static_cast<ptrdiff_t>(size), order_.end(), likelier);
    mass_.resize(size);
    for (size_t i = 0; i < size; ++i) mass_[i] = mass(static_cast<size_t>(order_[i]));
    if (size == most) total = std::accumulate(mass_.begin(), mass_.end(), 0.0);
    double kept_mass = 0.0;
    size_t kept = 0;
    // compared as Python compares, but for the last bits of the total, which numpy sums in pairs
    for (double cumulated = 0.0; kept < size; ++kept) {
      cumulated += mass_[kept];
      if (!(cumulated - mass_[kept] < options.top_p * total)) break;
      kept_mass = cumulated;
    }
    const bool ended = kept < size || size == most;  // what top_p keeps lies within these
    if (!ended && options.top_p < 1) continue;
    const double bound = draw * (ended ? kept_mass : total);
    double sum = 0.0;
    for (size_t i = 0; i < kept; ++i) {
      sum += mass_[i];
      if (sum > bound) return order_[i];
    }
    if (ended) return order_[kept > 0 ? kept - 1 : 0];
  }
}

}  // namespace skd
