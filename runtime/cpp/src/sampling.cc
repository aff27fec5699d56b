#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>

#include "error.h"

namespace skd {
namespace {

// Works in lanes, which compilers turn into vector instructions: std::max_element takes 8 us for 8192 logits.
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

// The index of the first of the largest logits. Only the block that holds it is searched element by element.
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
  return found == end ? 0 : found - logits;  // all are NaN: any token is as good
}

}  // namespace

void CheckSampling(const skd_row_options& options) {
  if (options.do_sample == 0) return;
  const auto fail = [](const char* where, double value, const char* remedy) {
    // with as many digits as it takes to see that it is out of range; JSON has no NaN
    const std::string shown = std::isfinite(value) ? nlohmann::json(value).dump() : std::to_string(value);
    throw CapacityError(shown + " is out of range", remedy, where);
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
  ids_.reserve(count);
  bins_.reserve(count);
  sorted_.reserve(count);
}

int64_t Sampler::Choose(const float* logits, int64_t vocab_size, const skd_row_options& options, double draw) {
  const int64_t likeliest = Likeliest(logits, vocab_size);
  if (options.do_sample == 0) return likeliest;
  const auto count = static_cast<size_t>(vocab_size);
  const Distribution row{logits, logits[likeliest], options.temperature};
  if (!PutIntoBins(row, count)) return likeliest;
  if (options.top_k > 0 && options.top_k < count) KeepLikeliest(row, options.top_k);
  double kept = Weigh(row);
  if (options.top_p < 1) kept = FirstAbove(row, std::nextafter(options.top_p * kept, 0.0)).mass;  // reaching top_p is enough
  return FirstAbove(row, std::min(draw * kept, std::nextafter(kept, 0.0))).id;
}

bool Sampler::Distribution::Likelier(int32_t a, int32_t b) const {
  return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

double Sampler::Distribution::MassOf(int32_t id) const {
  return std::exp((static_cast<double>(logits[id]) - static_cast<double>(top)) / temperature);
}

bool Sampler::PutIntoBins(const Distribution& row, size_t count) {
  const auto steepness = static_cast<float>(std::min(kBinsPerNat / row.temperature, 1e30));  // or it would be infinite in fp32
  ids_.resize(count);
  std::iota(ids_.begin(), ids_.end(), 0);
  bins_.resize(count);
  bool numbers = std::isfinite(row.top);
  for (size_t id = 0; id < count; ++id) {
    const float place = (row.top - row.logits[id]) * steepness;
    numbers = numbers && !std::isnan(place);
    bins_[id] = static_cast<uint16_t>(place < kBins - 1 ? place : kBins - 1);
  }
  sorted_bin_ = kBins;
  return numbers;
}

void Sampler::KeepLikeliest(const Distribution& row, size_t most) {
  std::array<size_t, kBins> counts{};
  for (const uint16_t bin : bins_) ++counts[bin];
  uint16_t cut = 0;
  for (; counts[cut] < most; ++cut) most -= counts[cut];
  Sort(row, cut);
  const int32_t last = sorted_[most - 1];
  size_t kept = 0;
  for (size_t i = 0; i < ids_.size(); ++i) {
    if (bins_[i] > cut || (bins_[i] == cut && row.Likelier(last, ids_[i]))) continue;
    ids_[kept] = ids_[i];
    bins_[kept++] = bins_[i];
  }
  ids_.resize(kept);
  bins_.resize(kept);
  sorted_bin_ = kBins;
}

double Sampler::Weigh(const Distribution& row) {
  mass_.fill(0);
  for (size_t i = 0; i < ids_.size(); ++i) mass_[bins_[i]] += row.MassOf(ids_[i]);
  return std::accumulate(mass_.begin(), mass_.end(), 0.0);
}

Sampler::Found Sampler::FirstAbove(const Distribution& row, double limit) {
  double before = 0;
  uint16_t bin = 0;
  for (; !(before + mass_[bin] > limit); ++bin) before += mass_[bin];
  const double after = before + mass_[bin];
  Sort(row, bin);
  Found found{sorted_.front(), before};
  for (const int32_t id : sorted_) {
    found = {id, found.mass + row.MassOf(id)};
    if (found.mass > limit) break;
  }
  found.mass = std::min(found.mass, after);  // which sums the same numbers in another order
  return found;
}

void Sampler::Sort(const Distribution& row, uint16_t bin) {
  if (sorted_bin_ == bin) return;
  sorted_.clear();
  for (size_t i = 0; i < ids_.size(); ++i) {
    if (bins_[i] == bin) sorted_.push_back(ids_[i]);
  }
  std::sort(sorted_.begin(), sorted_.end(), [&row](int32_t a, int32_t b) { return row.Likelier(a, b); });
  sorted_bin_ = bin;
}

}  // namespace skd
