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
  const auto count = static_cast<size_t>(vocab_size);
  bins_.reserve(count);
  members_.reserve(count);
}

int64_t Sampler::Choose(const float* logits, int64_t vocab_size, const skd_row_options& options, uint64_t step) {
  const int64_t likeliest = Likeliest(logits, vocab_size);
  if (options.do_sample == 0) return likeliest;
  const auto count = static_cast<size_t>(vocab_size);
  const Weights weights{logits, static_cast<int32_t>(likeliest), options.temperature};
  binned_ = options.top_k == 0 || options.top_k >= count;
  double kept = binned_ ? PutIntoBins(weights, count) : KeepLikeliest(weights, count, options.top_k);
  if (options.top_p < 1) kept = Passing(weights, std::nextafter(options.top_p * kept, 0.0)).mass;  // that reaches it is enough
  return Passing(weights, Uniform(options.seed, options.generator_row, step) * kept).id;
}

bool Sampler::Weights::Likelier(int32_t a, int32_t b) const { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); }

double Sampler::Weights::MassOf(size_t id) const {
  return std::exp((static_cast<double>(logits[id]) - static_cast<double>(logits[likeliest])) / temperature);
}

double Sampler::PutIntoBins(const Weights& weights, size_t count) {
  const auto steepness = static_cast<float>(std::min(kBinsPerNat / weights.temperature, 1e30));  // next to 0 it is none in fp32
  bins_.resize(count);
  for (size_t id = 0; id < count; ++id) {
    const float place = (weights.logits[weights.likeliest] - weights.logits[id]) * steepness;
    bins_[id] = static_cast<uint16_t>(place < kBins - 1 ? place : kBins - 1);
  }
  bin_mass_.fill(0);
  for (size_t id = 0; id < count; ++id) bin_mass_[bins_[id]] += weights.MassOf(id);
  return std::accumulate(bin_mass_.begin(), bin_mass_.end(), 0.0);
}

double Sampler::KeepLikeliest(const Weights& weights, size_t count, size_t most) {
  members_.resize(count);
  std::iota(members_.begin(), members_.end(), 0);
  std::partial_sort(members_.begin(), members_.begin() + static_cast<ptrdiff_t>(most), members_.end(),
                    [&weights](int32_t a, int32_t b) { return weights.Likelier(a, b); });
  members_.resize(most);
  double total = 0;
  for (const int32_t id : members_) total += weights.MassOf(static_cast<size_t>(id));
  return total;
}

Sampler::Found Sampler::Passing(const Weights& weights, double limit) {
  double mass = binned_ ? GoToBin(weights, limit) : 0;
  for (const int32_t id : members_) {
    mass += weights.MassOf(static_cast<size_t>(id));
    if (mass > limit) return {id, mass};
  }
  return {members_.back(), mass};
}

double Sampler::GoToBin(const Weights& weights, double limit) {
  double before = 0;
  uint16_t bin = 0, last = 0;
  for (; bin < kBins && !(before + bin_mass_[bin] > limit); ++bin) {
    if (bin_mass_[bin] > 0) last = bin;
    before += bin_mass_[bin];
  }
  if (bin == kBins) before -= bin_mass_[bin = last];
  members_.clear();
  for (size_t id = 0; id < bins_.size(); ++id) {
    if (bins_[id] == bin) members_.push_back(static_cast<int32_t>(id));
  }
  if (members_.empty()) members_.push_back(weights.likeliest);  // logits that are NaN or infinite: any token is as good
  std::sort(members_.begin(), members_.end(), [&weights](int32_t a, int32_t b) { return weights.Likelier(a, b); });
  return before;
}

}  // namespace skd
