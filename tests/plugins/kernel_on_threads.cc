// Runs the turn-around's CUDA kernel on the host: one thread of this process for each thread of a block, with their barriers,
// shuffles and atomic operations. Compares the kernel's tokens with the host version's. Built with -fsanitize=thread, which
// finds the kernel's races.
#include <pthread.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "../../plugins/turnaround/turnaround.h"

#undef SKD_TURNAROUND_THREADS
#define SKD_TURNAROUND_THREADS 64  // two warps

// what CUDA C++ provides
#define __CUDACC__
#define __device__
#define __host__
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)

namespace {

constexpr int kWarp = 32, kWarps = SKD_TURNAROUND_THREADS / kWarp;
struct Index {
  unsigned x;
};
thread_local Index threadIdx{0}, blockIdx{0};
pthread_barrier_t block, warps[kWarps];
uint64_t lanes[kWarps][kWarp];

void __syncthreads() { pthread_barrier_wait(&block); }

template <typename Number>
Number atomicAdd(Number* sum, Number value) {
  return __atomic_fetch_add(sum, value, __ATOMIC_RELAXED);
}

unsigned long long atomicMax(unsigned long long* most, unsigned long long value) {
  unsigned long long seen = __atomic_load_n(most, __ATOMIC_RELAXED);
  while (value > seen && !__atomic_compare_exchange_n(most, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}

uint64_t __shfl_xor_sync(unsigned, uint64_t value, int lane) {
  const unsigned warp = threadIdx.x / kWarp, own = threadIdx.x % kWarp;
  lanes[warp][own] = value;
  pthread_barrier_wait(&warps[warp]);
  const uint64_t other = lanes[warp][own ^ static_cast<unsigned>(lane)];
  pthread_barrier_wait(&warps[warp]);
  return other;
}

}  // namespace

#include "../../plugins/turnaround/turnaround.cu"

namespace {

void Kernel(const SkdTurnaround& state) {
  std::vector<std::thread> threads;
  for (unsigned index = 0; index < SKD_TURNAROUND_THREADS; ++index) {
    threads.emplace_back([&state, index] {
      threadIdx.x = index;
      skd_turnaround_kernel(state);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

template <typename Run>
int64_t Token(const std::vector<float>& logits, const SkdSampling& sampling, Run run) {
  int32_t step = 1, length = 0, finished = 0;
  int64_t input = 0, position = 0, token = -1;
  const int64_t row = 3;
  run(SkdTurnaround{1, static_cast<int32_t>(logits.size()), 1, 0, logits.data(), &sampling, &row, nullptr, &step, &input,
                    &position, &length, &finished, &token});
  return token;
}

}  // namespace

int main() {
  pthread_barrier_init(&block, nullptr, SKD_TURNAROUND_THREADS);
  for (pthread_barrier_t& warp : warps) pthread_barrier_init(&warp, nullptr, kWarp);
  std::mt19937 random(7);
  int wrong = 0;
  for (const size_t vocabulary : {1, 99, 5000, 50272}) {
    for (const float spread : {4.0f, 0.05f, 0.0f}) {  // 0: only five different logits
      std::vector<float> logits(vocabulary);
      std::normal_distribution<float> normal(0, spread > 0 ? spread : 1);
      for (float& logit : logits) logit = spread > 0 ? normal(random) : static_cast<float>(random() % 5);
      for (const SkdSampling& sampling : {SkdSampling{0, 0, 1, 1, 0}, SkdSampling{1, 0, 1, 1, 5}, SkdSampling{1, 40, 1.3, 0.8, 6},
                                          SkdSampling{1, 0, 0.3, 0.9, 7}, SkdSampling{1, 2000, 50, 0.99, 9}}) {
        const int64_t expected = Token(logits, sampling, [](const SkdTurnaround& state) { skd_turnaround_host(&state); });
        const int64_t found = Token(logits, sampling, Kernel);
        if (found == expected) continue;
        std::printf("%zu logits, spread %g, top_k %d: %lld and not %lld\n", vocabulary, spread, sampling.top_k,
                    static_cast<long long>(found), static_cast<long long>(expected));
        ++wrong;
      }
    }
  }
  return wrong == 0 ? 0 : 1;
}
