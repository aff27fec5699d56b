// The turn-around between two decode steps, on the device: from a step's logits to the next step's inputs, without the host.
//
// Every pointer of SkdTurnaround is memory that the caller keeps, the device's (or mapped to it, as pinned host memory is) for
// skd_turnaround_launch and the host's for skd_turnaround_host. One launch reads the logits and, for each row: chooses a token
// (as runtime/sampling.py does), stores it, makes it the next input, advances the row's position and length by one, and marks
// the row when the token is a stop id. A row that has finished repeats its last token. Addresses and sizes stay the same from
// step to step, so a launch can be captured in a CUDA graph.
#ifndef SKIPDECODE_TURNAROUND_H
#define SKIPDECODE_TURNAROUND_H

#include <stdint.h>

#define SKD_TURNAROUND_THREADS 1024  // of the kernel's block, for those who launch it by its name; a block a row

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SkdSampling {
  int32_t do_sample;   // 0: greedy, the rest is not read
  int32_t top_k;       // most likely tokens kept; 0: all
  double temperature;  // above 0
  double top_p;        // least probability mass kept, in (0, 1]
  uint64_t seed;
} SkdSampling;

typedef struct SkdTurnaround {
  int32_t rows;                 // B
  int32_t vocabulary;           // V, below 2^24
  int32_t kept_steps;           // rows of `tokens`, 1 or more
  int32_t stop_count;           // of `stop_ids`
  const float* logits;          // [B, V]
  const SkdSampling* sampling;  // [B]
  const int64_t* row_ids;       // [B], the caller's row numbers: a row's tokens do not depend on the batch's order
  const int64_t* stop_ids;      // [stop_count]
  int32_t* steps;               // [B], tokens chosen so far; advanced
  int64_t* input_ids;           // [B], the chosen tokens
  int64_t* position_ids;        // [B], advanced
  int32_t* seqlens_k;           // [B], advanced
  int32_t* finished;            // [B], 0 or 1
  int64_t* tokens;              // [kept_steps, B], a row's at its step modulo kept_steps
} SkdTurnaround;

// Enqueue on `stream` (a cudaStream_t). Returns 0, or a CUDA error number. Only in a library that nvcc has built.
int skd_turnaround_launch(const SkdTurnaround* state, void* stream);

// What an error number of skd_turnaround_launch means.
const char* skd_turnaround_error(int code);

// The same code on host memory, a thread a row: for checks, and where the logits are on the host anyway.
void skd_turnaround_host(const SkdTurnaround* state);

#ifdef __cplusplus
}
#endif

#endif
