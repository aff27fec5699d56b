// The turn-around between two decode steps, on the device: from a step's logits to the next step's inputs, without the host.
//
// Every pointer in SkdTurnaround is to memory that the caller owns: for skd_turnaround_launch device memory (or memory mapped
// to the device, as pinned host memory is), for skd_turnaround_host host memory. For each row, one launch chooses a token from
// the logits (as runtime/sampling.py does), stores it, makes it the next input, advances the row's position and length by one,
// and marks the row as finished if the token is a stop id. A finished row repeats its last token. Addresses and sizes stay the
// same from step to step, so a launch can be captured in a CUDA graph.
#ifndef SKIPDECODE_TURNAROUND_H
#define SKIPDECODE_TURNAROUND_H

#include <stdint.h>

#define SKD_TURNAROUND_THREADS 1024  // per block, for those who launch the kernel by its name; one block per row

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SkdSampling {
  int32_t do_sample;   // 0: greedy, the other fields are not read
  int32_t top_k;       // most likely tokens kept; 0: all
  double temperature;  // above 0
  double top_p;        // least probability mass kept, in (0, 1]
  uint64_t seed;
} SkdSampling;

typedef struct SkdTurnaround {
  int32_t rows;                 // B
  int32_t vocabulary;           // V, below 2^24
  int32_t kept_steps;           // steps that `tokens` holds, 1 or more
  int32_t stop_count;           // length of `stop_ids`
  const float* logits;          // [B, V]
  const SkdSampling* sampling;  // [B]
  const int64_t* row_ids;       // [B], the caller's row numbers, so that a row's tokens do not depend on the batch's order
  const int64_t* stop_ids;      // [stop_count]
  int32_t* steps;               // [B], tokens chosen so far; advanced
  int64_t* input_ids;           // [B], the chosen tokens
  int64_t* position_ids;        // [B], advanced
  int32_t* seqlens_k;           // [B], advanced
  int32_t* finished;            // [B], 0 or 1
  int64_t* tokens;              // [kept_steps, B], a row's token at its step modulo kept_steps
} SkdTurnaround;

// Enqueue on `stream` (a cudaStream_t). Returns 0, or a CUDA error number. Exists only in a library that nvcc has built.
int skd_turnaround_launch(const SkdTurnaround* state, void* stream);

// What an error number of skd_turnaround_launch means.
const char* skd_turnaround_error(int code);

// The same code on host memory, with one thread in place of a block: for tests, and for logits that are on the host anyway.
void skd_turnaround_host(const SkdTurnaround* state);

#ifdef __cplusplus
}
#endif

#endif
