// Chooses a token from one row's logits without sorting them: runtime/sampling.py's rule, for a block of threads of any size.
//
// A key orders the tokens: likeliest first, and among equals the lower id first. Top-k, top-p and the draw ask the same
// question: at which token, in this order, does a running weight pass a limit? Tokens are put into bins by their logits, and
// only those of the bin in which the weight passes the limit are compared with each other. If these are too many, the key is
// found a digit at a time (radix select).
//
// Probability masses are integers in units of 2^-40 of the likeliest token's mass. Their sums do not depend on the order of
// threads, so a run is repeatable. They are computed in fp32, because most GPUs have few units for doubles. A draw within 2^-20
// of a boundary may therefore choose the neighbour of runtime/sampling.py's token.
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
#define SKD_UNROLL _Pragma("unroll 8")  // eight loads in flight
#else
#define SKD_UNROLL
#endif

namespace skipdecode {

constexpr int kIdBits = 24, kDigitBits = 8, kDigits = 1 << kDigitBits;
constexpr uint64_t kIdMask = (uint64_t{1} << kIdBits) - 1;
constexpr int kBins = 2048, kGroup = 32;  // bins, and how many of them are summed up at a time
constexpr int kMembers = 1024;            // tokens of a bin that are compared with each other, at most
constexpr float kUnit = static_cast<float>(uint64_t{1} << 40);
constexpr double kLog2E = 1.4426950408889634;

// The memory that a block's threads share.
struct Scratch {
  uint64_t bins[kBins], groups[kBins / kGroup];
  uint64_t keys[kMembers], weights[kMembers];  // of a bin's members; DigitByDigit keeps digits' weights in `keys`
  uint64_t value, running;
  int32_t bin, members;
};

// A 56-bit key that orders tokens: a larger key is a likelier token or, among equals, a lower id.
SKD_BOTH inline uint64_t KeyOf(float logit, int32_t id) {
  union {
    float number;
    uint32_t bits;
  } view{logit + 0.0f};  // -0 becomes 0
  const uint32_t ordered = (view.bits & 0x80000000u) ? ~view.bits : view.bits | 0x80000000u;
  return (static_cast<uint64_t>(ordered) << kIdBits) | (kIdMask - static_cast<uint64_t>(id));
}

SKD_BOTH inline int32_t IdOf(uint64_t key) { return static_cast<int32_t>(kIdMask - (key & kIdMask)); }

// A number in [0, 1) from splitmix64, the same as runtime/sampling.py's `uniform`.
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

// The bin of a logit that lies `below` the likeliest one: `per_unit` bins per unit, and the last bin for all further down.
SKD_BOTH inline int32_t BinOf(float below, float per_unit) {
  const float bin = below * per_unit;
  return bin < static_cast<float>(kBins - 1) ? static_cast<int32_t>(bin) : kBins - 1;  // NaN: the last one
}

struct Count {
  float greatest;  // the likeliest token's logit
  SKD_BOTH uint64_t operator()(float) const { return 1; }
  SKD_BOTH int32_t Bin(float logit) const { return BinOf(greatest - logit, 32.0f); }
};

struct Mass {
  float greatest, steepness;  // steepness: how many powers of two a mass falls by when its logit falls by 1
  SKD_BOTH uint64_t operator()(float logit) const {
    const float mass = exp2f((logit - greatest) * steepness) * kUnit + 0.5f;
    return mass >= 1.0f ? static_cast<uint64_t>(mass) : 0;
  }
  // 48 bins for each power of two: the bins cover 42 powers, and no mass is left beyond them
  SKD_BOTH int32_t Bin(float logit) const { return BinOf((greatest - logit) * steepness, 48.0f); }
};

// One row, worked on by a block. Block has thread(), size(), sync(), add(uint64_t*, uint64_t), greatest(uint64_t*, uint64_t),
// and next(int32_t*), which adds one and returns the old value.
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

  // Fill the bins with the weights of all tokens whose key is `least` or more; returns the sum of these weights.
  template <class Weight>
  SKD_BOTH uint64_t Fill(Weight weight, uint64_t least) {
    block.sync();
    for (int bin = block.thread(); bin < kBins; bin += block.size()) scratch.bins[bin] = 0;
    block.sync();
    SKD_UNROLL for (int32_t id = block.thread(); id < vocabulary; id += block.size()) {
      const float logit = logits[id];
      if (KeyOf(logit, id) >= least) block.add(&scratch.bins[weight.Bin(logit)], weight(logit));
    }
    block.sync();
    for (int group = block.thread(); group < kBins / kGroup; group += block.size()) {
      uint64_t sum = 0;
      for (int bin = kGroup * group; bin < kGroup * (group + 1); ++bin) sum += scratch.bins[bin];
      scratch.groups[group] = sum;
    }
    Set(0);
    if (block.thread() == 0)
      for (const uint64_t sum : scratch.groups) scratch.value += sum;
    return Get();
  }

  // The key of the first token at which the running weight is above `limit`; sets scratch.running to that weight. Expects the
  // bins as Fill left them for the same weight and `least`, with a sum above `limit`.
  template <class Weight>
  SKD_BOTH uint64_t Passing(Weight weight, uint64_t least, uint64_t limit) {
    block.sync();
    if (block.thread() == 0) FindBin(limit);
    block.sync();
    const int32_t wanted = scratch.bin;
    const uint64_t before = scratch.running;
    SKD_UNROLL for (int32_t id = block.thread(); id < vocabulary; id += block.size()) {
      const float logit = logits[id];
      if (weight.Bin(logit) != wanted || KeyOf(logit, id) < least) continue;
      const int32_t member = block.next(&scratch.members);
      if (member >= kMembers) continue;
      scratch.keys[member] = KeyOf(logit, id);
      scratch.weights[member] = weight(logit);
    }
    Set(0);
    return scratch.members <= kMembers ? AmongMembers(before, limit) : DigitByDigit(weight, least, limit);
  }

  // Set scratch.bin to the bin in which the running weight passes `limit`, scratch.running to the weight before it, and
  // scratch.members to 0.
  SKD_BOTH void FindBin(uint64_t limit) {
    uint64_t before = 0;
    int32_t group = 0;
    while (before + scratch.groups[group] <= limit) before += scratch.groups[group++];
    int32_t bin = kGroup * group;
    while (before + scratch.bins[bin] <= limit) before += scratch.bins[bin++];
    scratch.bin = bin;
    scratch.running = before;
    scratch.members = 0;
  }

  // `Passing` among the bin's members, each of which is compared with all others.
  SKD_BOTH uint64_t AmongMembers(uint64_t before, uint64_t limit) {
    const int32_t members = scratch.members;
    uint64_t key = 0, running = 0;  // of this thread's first token that passes
    for (int32_t member = block.thread(); member < members; member += block.size()) {
      const uint64_t own = scratch.keys[member];
      uint64_t sum = before;
      for (int32_t other = 0; other < members; ++other) sum += scratch.keys[other] >= own ? scratch.weights[other] : 0;
      if (sum <= limit || own < key) continue;
      key = own;
      running = sum;
    }
    block.greatest(&scratch.value, key);
    const uint64_t first = Get();
    if (key == first) scratch.running = running;
    block.sync();
    return first;
  }

  // `Passing` without bins, by radix select over the keys.
  template <class Weight>
  SKD_BOTH uint64_t DigitByDigit(Weight weight, uint64_t least, uint64_t limit) {
    uint64_t* const digits = scratch.keys;
    uint64_t prefix = 0, running = 0;
    for (int shift = 32 + kIdBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
      for (int digit = block.thread(); digit < kDigits; digit += block.size()) digits[digit] = 0;
      block.sync();
      for (int32_t id = block.thread(); id < vocabulary; id += block.size()) {
        const uint64_t key = KeyOf(logits[id], id);
        if (key >= least && (key >> (shift + kDigitBits)) == (prefix >> (shift + kDigitBits)))
          block.add(&digits[(key >> shift) & (kDigits - 1)], weight(logits[id]));
      }
      block.sync();
      if (block.thread() == 0) {
        int digit = kDigits - 1;
        for (; digit > 0 && running + digits[digit] <= limit; --digit) running += digits[digit];
        scratch.value = prefix | (static_cast<uint64_t>(digit) << shift);
        scratch.running = running;
      }
      prefix = Get();
      running = scratch.running;
      block.sync();
    }
    if (block.thread() == 0) scratch.running = running + weight(logits[IdOf(prefix)]);
    block.sync();
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

// Choose one row's token.
template <class Block>
SKD_BOTH int32_t ChooseToken(Row<Block>& row, const SkdSampling& how, int64_t row_id, int32_t step) {
  const uint64_t likeliest = row.Greatest();
  const float greatest = row.logits[IdOf(likeliest)];
  if (!how.do_sample || !(greatest - greatest == 0.0f)) return IdOf(likeliest);  // infinite and NaN logits have no masses
  uint64_t least = 0;
  if (how.top_k > 0 && how.top_k < row.vocabulary) {
    row.Fill(Count{greatest}, 0);
    least = row.Passing(Count{greatest}, 0, static_cast<uint64_t>(how.top_k) - 1);
  }
  const double steepness = kLog2E / how.temperature;
  const Mass mass{greatest, steepness < 1e30 ? static_cast<float>(steepness) : 1e30f};  // a temperature near 0 overflows fp32
  uint64_t kept = row.Fill(mass, least);
  if (how.top_p < 1.0) {
    const uint64_t wanted = static_cast<uint64_t>(ceil(how.top_p * static_cast<double>(kept)));
    row.Passing(mass, least, wanted > 0 ? wanted - 1 : 0);
    kept = row.scratch.running;
  }
  const uint64_t drawn = static_cast<uint64_t>(Uniform(how.seed, row_id, step) * static_cast<double>(kept));
  return IdOf(row.Passing(mass, least, drawn < kept ? drawn : kept - 1));
}

// Turn one row around. The block's first thread writes the row's state.
template <class Block>
SKD_BOTH void TurnAround(Block block, Scratch& scratch, const SkdTurnaround& state, int32_t index) {
  const int32_t step = state.steps[index];
  Row<Block> row{block, scratch, state.logits + static_cast<int64_t>(index) * state.vocabulary, state.vocabulary};
  const bool over = state.finished[index] != 0;  // the same in all threads of the block
  const int64_t token = over ? state.input_ids[index] : ChooseToken(row, state.sampling[index], state.row_ids[index], step);
  block.sync();  // all threads have read the state
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
