// From logits to a token: greedy, or sampled with the generator that runtime/sampling.py documents.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "skipdecode/skipdecode.h"

namespace skd {

// Throws SKD_ERROR_CAPACITY for a value out of its range.
void CheckSampling(const skd_row_options& options);

// Chooses tokens; keeps its scratch memory. Sorting a vocabulary takes longer than many a decode step: tokens are put into bins
// by their logits, and only the bin in which the k-th one, the end of what top-p keeps, or the draw lies is sorted.
class Sampler {
 public:
  // Memory for a row's tokens, once and for all: Choose allocates nothing after this.
  void Prepare(int64_t vocab_size, const skd_row_options& options);
  // One row's logits [V] float32; `step`: 0 for the token after the prompt.
  int64_t Choose(const float* logits, int64_t vocab_size, const skd_row_options& options, uint64_t step);

 private:
  // What is 64 nats below the likeliest token has no mass to speak of, and shares the last bin.
  static constexpr uint16_t kBins = 1024, kBinsPerNat = 16;

  // A row's tokens.
  struct Weights {
    const float* logits;
    int32_t likeliest;
    double temperature;
    bool Likelier(int32_t a, int32_t b) const;  // of equals the lower id
    double MassOf(size_t id) const;             // probability over the likeliest token's
  };
  struct Found {
    int32_t id;
    double mass;  // of the tokens down to it
  };

  // Both return the mass of the tokens that there are to choose from.
  double PutIntoBins(const Weights& weights, size_t count);
  double KeepLikeliest(const Weights& weights, size_t count, size_t most);
  // The first token, likeliest first, with which the running mass is above `limit`; else the last one.
  Found Passing(const Weights& weights, double limit);
  // Makes the members those of the bin in which it is; returns the mass before them.
  double GoToBin(const Weights& weights, double limit);

  bool binned_ = false;         // or all are members
  std::vector<uint16_t> bins_;  // of each token
  std::array<double, kBins> bin_mass_{};
  std::vector<int32_t> members_;  // likeliest first
};

// A number in [0, 1): the top 53 bits of splitmix64 (Steele et al. 2014) at seed and row * 2^32 + step, twice mixed.
double Uniform(uint64_t seed, uint64_t row, uint64_t step);

}  // namespace skd
