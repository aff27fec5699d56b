// From logits to a token: greedy, or sampled with the generator that runtime/sampling.py documents.
#pragma once

#include <cstdint>
#include <vector>

#include "skipdecode/skipdecode.h"

namespace skd {

// Throws SKD_ERROR_CAPACITY for a value out of its range.
void CheckSampling(const skd_row_options& options);

// Chooses tokens; keeps its scratch memory.
class Sampler {
 public:
  // Memory for a row's tokens, once and for all: Choose allocates nothing after this.
  void Prepare(int64_t vocab_size, const skd_row_options& options);
  // One row's logits [V] float32; `step`: 0 for the token after the prompt.
  int64_t Choose(const float* logits, int64_t vocab_size, const skd_row_options& options, uint64_t step);

 private:
  int64_t Sample(const float* logits, int64_t vocab_size, const skd_row_options& options, uint64_t step);
  std::vector<int32_t> order_;
  std::vector<double> mass_;
};

// A number in [0, 1): the top 53 bits of splitmix64 (Steele et al. 2014) at seed and row * 2^32 + step, twice mixed.
double Uniform(uint64_t seed, uint64_t row, uint64_t step);

}  // namespace skd
