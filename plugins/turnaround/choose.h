// From one row's logits to a token, without sorting: runtime/sampling.py's rule, for a block of threads of any size.
//
// Tokens are ordered by a key, likeliest first, lower id first among equals. Top-k, top-p and the draw are the same question: at
// which token, in this order, does a running weight pass a limit? It is answered a digit of the key at a time, from histograms of
// the weights (radix select). Probability masses are whole numbers of 2^-40 of the likeliest token's: sums do not depend on the
// order of threads, so a run is repeatable. Differs from runtime/sampling.py where a draw lies within 2^-40 of a boundary.
#pragma once

#include <math.h>
#include <stdint.h>

#include "turnaround.h"

#ifdef __CUDACC__
#define SKD_BOTH __host__ __device__
#else
#define SKD_BOTH
#endif
#ifdef __CUDA_ARCH__
#define SKD_UNROLL _Pragma("unroll 8")  // so many loads are under way at a time
#else
#define SKD_UNROLL
#endif

namespace skipdecode {

constexpr int kIdBits = 24, kDigitBits = 8, kBins = 1 << kDigitBits;
constexpr uint64_t kIdMask = (uint64_t{1} << kIdBits) - 1;
constexpr double kUnit = static_cast<double>(uint64_t{1} << 40);

// What a block shares.
struct Scratch {
  uint64_t bins[kBins];
  uint64_t value, limit;
};

// 56 bits that order tokens: larger is likelier, then lower id.
SKD_BOTH inline uint64_t KeyOf(float logit, int32_t id) {
  union {
    float number;
    uint32_t bits;
  } view{logit + 0.0f};  // -0 is 0
  const uint32_t ordered = (view.bits & 0x80000000u) ? ~view.bits : view.bits | 0x80000000u;
  return (static_cast<uint64_t>(ordered) << kIdBits) | (kIdMask - static_cast<uint64_t>(id));
}

SKD_BOTH inline int32_t IdOf(uint64_t key) { return static_cast<int32_t>(kIdMask - (key & kIdMask)); }

// splitmix64, as runtime/sampling.py's `uniform`: in [0, 1).
SKD_BOTH inline double Uniform(uint64_t seed, int64_t row, int32_t step) {
  uint64_t value = seed * 0x9E3779B97F4A7C15u + (static_cast<uint64_t>(row) << 32) + static_cast<uint64_t>(step);
  for (int round = 0; round < 2; ++round) {
    value += 0x9E3779B97F4A7C15u;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    value ^= value >> 31;
  }
  return static_cast<double>(value >> 11) * (1.0 / 9007199254740992.0);
}

struct Count {
  SKD_BOTH uint64_t operator()(float) const { return 1; }
};

struct Mass {
  double temperature, greatest;  // greatest: the likeliest token's logit
  SKD_BOTH uint64_t operator()(float logit) const {
    return static_cast<uint64_t>(exp((static_cast<double>(logit) - greatest) / temperature) * kUnit + 0.5);
  }
};

// One row, seen by a block. Block: thread(), size(), sync(), add(uint64_t*, uint64_t), greatest(uint64_t*, uint64_t).
template <class Block>
struct Row {
  Block block;
  Scratch& scratch;
  const float* logits;
  int32_t vocabulary;

  // The likeliest token's key.
  SKD_BOTH uint64_t Greatest() {
    Set(0);
    uint64_t own = 0;
    SKD_UNROLL for (int32_t id = block.thread(); id < vocabulary; id += block.size()) {
      const uint64_t key = KeyOf(logits[id], id);
      own = key > own ? key : own;
    }
    block.greatest(&scratch.value, own);
    return Get();
  }

  // The weight of all tokens from the likeliest down to `least`.
  template <class Weight>
  SKD_BOTH uint64_t Total(Weight weight, uint64_t least) {
    Set(0);
    uint64_t own = 0;
    for (int32_t id = block.thread(); id < vocabulary; id += block.size())
      if (KeyOf(logits[id], id) >= least) own += weight(logits[id]);
    block.add(&scratch.value, own);
    return Get();
  }

  // The key of the first token at which the running weight is above `limit`; of the last one, where it never is.
  template <class Weight>
  SKD_BOTH uint64_t Passing(Weight weight, uint64_t least, uint64_t limit) {
    uint64_t prefix = 0;
    for (int shift = 32 + kIdBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
      for (int bin = block.thread(); bin < kBins; bin += block.size()) scratch.bins[bin] = 0;
      block.sync();
      for (int32_t id = block.thread(); id < vocabulary; id += block.size()) {
        const uint64_t key = KeyOf(logits[id], id);
        if (key >= least && (key >> (shift + kDigitBits)) == (prefix >> (shift + kDigitBits)))
          block.add(&scratch.bins[(key >> shift) & (kBins - 1)], weight(logits[id]));
      }
      block.sync();
      if (block.thread() == 0) {
        int digit = kBins - 1, lightest = digit;
        for (; digit >= 0 && scratch.bins[digit] <= limit; --digit) {
          if (scratch.bins[digit] > 0) lightest = digit;
          limit -= scratch.bins[digit];
        }
        const int found = digit >= 0 ? digit : lightest;
        scratch.value = prefix | (static_cast<uint64_t>(found) << shift);
        scratch.limit = digit >= 0 ? limit : ~uint64_t{0};
      }
      block.sync();
      prefix = scratch.value;
      limit = scratch.limit;
      block.sync();
    }
    return prefix;
  }

  SKD_BOTH void Set(uint64_t value) {
    block.sync();
    if (block.thread() == 0) scratch.value = value;
    block.sync();
  }

  SKD_BOTH uint64_t Get() {
    block.sync();
    return scratch.value;
  }
};

// One row's token.
template <class Block>
SKD_BOTH int32_t ChooseToken(Row<Block>& row, const SkdSampling& how, int64_t row_id, int32_t step) {
  const uint64_t likeliest = row.Greatest();
  if (!how.do_sample) return IdOf(likeliest);
  const Mass mass{how.temperature, static_cast<double>(row.logits[IdOf(likeliest)])};
  uint64_t least = 0;
  if (how.top_k > 0 && how.top_k < row.vocabulary) least = row.Passing(Count{}, 0, static_cast<uint64_t>(how.top_k) - 1);
  uint64_t total = row.Total(mass, least);
  if (how.top_p < 1.0) {
    const uint64_t wanted = static_cast<uint64_t>(ceil(how.top_p * static_cast<double>(total)));
    least = row.Passing(mass, least, wanted > 0 ? wanted - 1 : 0);
    total = row.Total(mass, least);
  }
  const double drawn = Uniform(how.seed, row_id, step) * static_cast<double>(total);
  return IdOf(row.Passing(mass, least, static_cast<uint64_t>(drawn)));
}

// One row's turn-around; a block's first thread writes the row's state.
template <class Block>
SKD_BOTH void TurnAround(Block block, Scratch& scratch, const SkdTurnaround& state, int32_t index) {
  const int32_t step = state.steps[index];
  Row<Block> row{block, scratch, state.logits + static_cast<int64_t>(index) * state.vocabulary, state.vocabulary};
  const bool over = state.finished[index] != 0;  // the same in all threads of the block
  const int64_t token = over ? state.input_ids[index] : ChooseToken(row, state.sampling[index], state.row_ids[index], step);
  block.sync();  // everybody has read the state
  if (block.thread() != 0) return;
  state.tokens[static_cast<int64_t>(step % state.kept_steps) * state.rows + index] = token;
  state.steps[index] = step + 1;
  state.input_ids[index] = token;
  state.position_ids[index] += 1;
  state.seqlens_k[index] += 1;
  for (int32_t i = 0; i < state.stop_count; ++i)
    if (token == state.stop_ids[i]) state.finished[index] = 1;
}

}  // namespace skipdecode
