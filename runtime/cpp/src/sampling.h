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
  // One row's logits [V] float32; `draw`: of Uniform, at step 0 for the token after the prompt.
  int64_t Choose(const float* logits, int64_t vocab_size, const skd_row_options& options, double draw);

 private:
  // What is 64 nats below the likeliest token has no mass to speak of, and shares the last bin.
  static constexpr uint16_t kBins = 1024, kBinsPerNat = 16;

  struct Distribution {
    const float* logits;  // [V]
    float top;            // the largest of them
    double temperature;
    bool Likelier(int32_t a, int32_t b) const;  // of equals the lower id
    double MassOf(int32_t id) const;            // probability over the likeliest token's
  };
  struct Found {
    int32_t id;
    double mass;  // of the tokens down to it
  };

  // Returns whether the logits are numbers, none of them infinite but those that forbid a token.
  bool PutIntoBins(const Distribution& row, size_t count);
  // Leaves the `most` likeliest alone.
  void KeepLikeliest(const Distribution& row, size_t most);
  // Returns the mass of all tokens.
  double Weigh(const Distribution& row);
  // The first token, likeliest first, with which the running mass is above `limit`, which is below that of all.
  Found Passing(const Distribution& row, double limit);
  void Sort(const Distribution& row, uint16_t bin);

  std::vector<int32_t> ids_;          // of the tokens that there are to choose from
  std::vector<uint16_t> bins_;        // of each
  std::array<double, kBins> mass_{};  // of each bin
  std::vector<int32_t> sorted_;       // a bin's tokens, likeliest first
  uint16_t sorted_bin_ = kBins;       // which; kBins: none
};

// A number in [0, 1): the top 53 bits of splitmix64 (Steele et al. 2014) at seed and row * 2^32 + step, twice mixed.
double Uniform(uint64_t seed, uint64_t row, uint64_t step);

}  // namespace skd
