// The turn-around as a CUDA kernel, with one block per row. Compiled as C++ (g++ -x c++), this file has only the host version.
#include "choose.h"
#include "turnaround.h"

namespace {

using skipdecode::Scratch;

struct HostBlock {
  SKD_BOTH int32_t thread() const { return 0; }
  SKD_BOTH int32_t size() const { return 1; }
  SKD_BOTH void sync() const {}
  SKD_BOTH void add(uint64_t* sum, uint64_t value) const { *sum += value; }
  SKD_BOTH void greatest(uint64_t* most, uint64_t value) const { *most = value > *most ? value : *most; }
  SKD_BOTH int32_t next(int32_t* count) const { return (*count)++; }
};

#ifdef __CUDACC__

constexpr int kThreads = SKD_TURNAROUND_THREADS;

struct DeviceBlock {
  __device__ int32_t thread() const { return static_cast<int32_t>(threadIdx.x); }
  __device__ int32_t size() const { return kThreads; }
  __device__ void sync() const { __syncthreads(); }
  // Adds 32-bit halves, because a 64-bit atomic on shared memory is a compare-and-swap loop. The lower half tells the carry.
  __device__ void add(uint64_t* sum, uint64_t value) const {
    auto* const halves = reinterpret_cast<unsigned*>(sum);
    const auto lower = static_cast<unsigned>(value);
    unsigned upper = static_cast<unsigned>(value >> 32);
    if (lower > 0) upper += atomicAdd(&halves[0], lower) + lower < lower ? 1 : 0;
    if (upper > 0) atomicAdd(&halves[1], upper);
  }
  // All threads must call it. One per warp does the atomicMax, which on 64 bits of shared memory is a compare-and-swap loop.
  __device__ void greatest(uint64_t* most, uint64_t value) const {
    for (int lane = 16; lane > 0; lane /= 2) {
      const uint64_t other = __shfl_xor_sync(0xffffffffu, value, lane);
      value = other > value ? other : value;
    }
    if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<unsigned long long*>(most), static_cast<unsigned long long>(value));
  }
  __device__ int32_t next(int32_t* count) const { return atomicAdd(count, 1); }
};

#endif

}  // namespace

extern "C" void skd_turnaround_host(const SkdTurnaround* state) {
  Scratch scratch;
  for (int32_t row = 0; row < state->rows; ++row) skipdecode::TurnAround(HostBlock{}, scratch, *state, row);
}

#ifdef __CUDACC__

// Those who load the PTX find the kernel by this name. Launch state->rows blocks of kThreads threads.
extern "C" __global__ void __launch_bounds__(kThreads) skd_turnaround_kernel(SkdTurnaround state) {
  __shared__ Scratch scratch;
  skipdecode::TurnAround(DeviceBlock{}, scratch, state, static_cast<int32_t>(blockIdx.x));
}

#ifdef __NVCC__  // only nvcc compiles kernel launches

extern "C" int skd_turnaround_launch(const SkdTurnaround* state, void* stream) {
  if (state->rows == 0) return 0;
  skd_turnaround_kernel<<<static_cast<unsigned>(state->rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*state);
  return static_cast<int>(cudaGetLastError());
}

extern "C" const char* skd_turnaround_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

#endif
#endif
