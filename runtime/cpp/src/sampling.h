// From logits to a token: greedy, or sampled with the generator that runtime/sampling.py documents.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "skipdecode/skipdecode.h"

namespace skd {

// Throws SKD_ERROR_CAPACITY if a value is out of range.
void CheckSampling(const skd_row_options& options);

// Chooses tokens; keeps its scratch memory. Sorting a whole vocabulary takes longer than many a decode step. So tokens are
// put into bins by their logits, and a bin is sorted only if it holds the k-th token, the last one that top-p keeps, or the
// drawn one.
class Sampler {
 public:
  // Allocate what a row with these options needs, so that Choose allocates nothing.
  void Prepare(int64_t vocab_size, const skd_row_options& options);
  // Choose from a row's logits [V] float32. `draw`: from Uniform, with step 0 for the token after the prompt.
  int64_t Choose(const float* logits, int64_t vocab_size, const skd_row_options& options, double draw);

 private:
  // Tokens 64 nats or more below the likeliest have negligible mass and share the last bin.
  static constexpr uint16_t kBins = 1024, kBinsPerNat = 16;

  struct Distribution {
    const float* logits;  // [V]
    float top;            // the largest of them
    double temperature;
    bool Likelier(int32_t a, int32_t b) const;  // the lower id if the logits are equal
    double MassOf(int32_t id) const;            // its probability relative to the likeliest token's
  };
  struct Found {
    int32_t id;
    double mass;  // of this token and all likelier ones
  };

  // Returns whether the logits can be sampled from: none is NaN, and none infinite except -inf, which forbids a token.
  bool PutIntoBins(const Distribution& row, size_t count);
  // Keeps only the `most` likeliest tokens.
  void KeepLikeliest(const Distribution& row, size_t most);
  // Fills `mass_` and returns the mass of all tokens.
  double Weigh(const Distribution& row);
  // The first token, likeliest first, that brings the running mass above `limit`, which must be below the mass of all tokens.
  Found FirstAbove(const Distribution& row, double limit);
  void Sort(const Distribution& row, uint16_t bin);

  std::vector<int32_t> ids_;          // of the tokens to choose from
  std::vector<uint16_t> bins_;        // of each of these
  std::array<double, kBins> mass_{};  // of each bin
  std::vector<int32_t> sorted_;       // a bin's tokens, likeliest first
  uint16_t sorted_bin_ = kBins;       // the bin in `sorted_`; kBins: none
};

// A number in [0, 1): the top 53 bits of splitmix64 (Steele et al. 2014) at seed and row * 2^32 + step, mixed twice.
double Uniform(uint64_t seed, uint64_t row, uint64_t step);

}  // namespace skd
