// The GPU's stream and graphs, on a stand-in for NVIDIA's driver (tests/standin/libcuda.cc), which the loader must find first.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <string>
#include <vector>

#include "catch.h"
#include "cuda_stream.h"
#include "error.h"
#include "replay.h"
#include "standin_driver.h"
#include "turn_around.h"

namespace {

constexpr size_t kBytes = 64;

// Counts work, which is done by whichever thread waits for it.
using Counter = std::atomic<int>;

// Put work on the stream, as an engine does. `done` counts how often it was done.
void Enqueue(Counter* done) {
  const auto count = [](void* data) { ++*static_cast<Counter*>(data); };
  Driver<int(void*, void (*)(void*), void*)>("standin_launch")(skd::cuda_stream::Handle(), count, done);
}

// Wait until all enqueued work is done.
void WaitForWork() {
  std::byte* const memory = skd::cuda_stream::Allocate(1);
  skd::cuda_stream::Free(memory);
}

// Run such work together with `more_calls`, five times. Returns how many of the runs were graph launches, or -1 if work was lost.
int GraphLaunchesInFiveRuns(const skd::cuda_stream::Calls& more_calls, bool graphs = true) {
  skd::Replay replay(graphs);
  Counter done{0};
  int launched = 0;
  const skd::cuda_stream::Calls calls = [&] {
    Enqueue(&done);
    more_calls();
  };
  for (int time = 1; time <= 5; ++time) {
    launched += replay.Run(calls) ? 1 : 0;
    WaitForWork();
    if (done != time) return -1;
  }
  return launched;
}

size_t TakenBytes() { return Driver<size_t()>("standin_taken")(); }

}  // namespace

TEST_CASE("bytes return from the GPU as they were sent and copied, and are zero at first and when cleared") {
  const size_t taken = TakenBytes();
  {
    using Block = std::unique_ptr<std::byte, void (*)(std::byte*) noexcept>;
    const Block first(skd::cuda_stream::Allocate(kBytes), skd::cuda_stream::Free);
    const Block second(skd::cuda_stream::Allocate(kBytes), skd::cuda_stream::Free);
    const Block pinned(skd::cuda_stream::AllocateHost(kBytes), skd::cuda_stream::FreeHost);
    std::vector<char> sent(kBytes, 'a'), found(kBytes, 'b');
    skd::cuda_stream::Receive(found.data(), second.get(), kBytes);
    CHECK(found == std::vector<char>(kBytes, 0));
    CHECK(std::memcmp(pinned.get(), found.data(), kBytes) == 0);
    skd::cuda_stream::Send(first.get(), sent.data(), kBytes);
    skd::cuda_stream::Copy(second.get(), first.get(), kBytes);
    skd::cuda_stream::Receive(pinned.get(), second.get(), kBytes);
    CHECK(std::memcmp(pinned.get(), sent.data(), kBytes) == 0);
    skd::cuda_stream::Clear(second.get() + 1, kBytes - 1);
    skd::cuda_stream::Receive(found.data(), second.get(), kBytes);
    std::fill(sent.begin() + 1, sent.end(), 0);
    CHECK(found == sent);
    CHECK(TakenBytes() >= taken + 3 * kBytes);
  }
  CHECK(TakenBytes() == taken);
}

TEST_CASE("sent data may change once everything has been waited for") {
  using Block = std::unique_ptr<std::byte, void (*)(std::byte*) noexcept>;
  const Block memory(skd::cuda_stream::Allocate(kBytes), skd::cuda_stream::Free);
  const Block pinned(skd::cuda_stream::AllocateHost(kBytes), skd::cuda_stream::FreeHost);  // the stand-in reads it late
  std::vector<char> found(kBytes, 'b');
  std::memset(pinned.get(), 'a', kBytes);
  skd::cuda_stream::Send(memory.get(), pinned.get(), kBytes);
  skd::cuda_stream::WaitForAll();
  std::memset(pinned.get(), 'c', kBytes);
  skd::cuda_stream::Receive(found.data(), memory.get(), kBytes);
  CHECK(found == std::vector<char>(kBytes, 'a'));
}

TEST_CASE("a GPU without room is an error that says how much was asked for") {
  try {
    skd::cuda_stream::Allocate(size_t{3} << 30);
    FAIL("it was allocated");
  } catch (const skd::Error& error) {
    CHECK(error.code() == SKD_ERROR_CAPACITY);
    CHECK(std::string(error.what()).find("no room for a buffer of 3072 MiB") != std::string::npos);
  }
}

TEST_CASE("a repeated run is a graph from its second time on and leaves no memory behind") {
  const size_t taken = TakenBytes();
  CHECK(GraphLaunchesInFiveRuns([] {}) == 4);
  CHECK(TakenBytes() == taken);
  CHECK(GraphLaunchesInFiveRuns([] {}, false) == 0);
}

TEST_CASE("with graphs, another context has run a kernel, once") {
  CHECK(GraphLaunchesInFiveRuns([] {}) == 4);
  CHECK(GraphLaunchesInFiveRuns([] {}) == 4);
  CHECK(*Driver<int>("standin_kernels_of_nothing") == 1);
}

TEST_CASE("a run that calls the host stays a call") {
  const std::string before = Alive();
  CHECK(GraphLaunchesInFiveRuns([] {
          const auto nothing = [](void*) {};
          Driver<int(void*, void (*)(void*), void*)>("cuLaunchHostFunc")(skd::cuda_stream::Handle(), nothing, nullptr);
        }) == 0);
  CHECK(Alive() == before);
}

TEST_CASE("a run that reads memory of the host stays a call") {
  std::byte* const pinned = skd::cuda_stream::AllocateHost(kBytes);
  std::byte* const memory = skd::cuda_stream::Allocate(kBytes);
  CHECK(GraphLaunchesInFiveRuns([&] {
          using Copy = int(unsigned long long, const void*, size_t, void*);  // NOLINT(google-runtime-int)
          auto* const send = Driver<Copy>("cuMemcpyHtoDAsync_v2");
          REQUIRE(send(reinterpret_cast<uintptr_t>(memory), pinned, kBytes, skd::cuda_stream::Handle()) == 0);
        }) == 0);
  skd::cuda_stream::Free(memory);
  skd::cuda_stream::FreeHost(pinned);
}

TEST_CASE("a run that cannot become a graph stays a call") {
  int* const without_graphs = Driver<int>("standin_without_graphs");
  *without_graphs = 1;
  CHECK(GraphLaunchesInFiveRuns([] {}) == 0);
  *without_graphs = 0;
}

TEST_CASE("an exception while a run is recorded is thrown by the call that follows") {
  const std::string before = Alive();
  skd::Replay replay(true);
  Counter done{0};
  replay.Run([&] { Enqueue(&done); });
  CHECK_THROWS_AS(replay.Run([] { throw skd::CapacityError("full", "wait"); }), skd::Error);
  CHECK_FALSE(replay.Run([&] { Enqueue(&done); }));
  WaitForWork();
  CHECK(done == 2);
  CHECK(Alive() == before);
}

TEST_CASE("a driver older than the kernel's language is reported as such") {
  int* const old = Driver<int>("standin_old");
  *old = 1;
  CHECK_THROWS_WITH(skd::cuda_stream::LoadModule(skd::kTurnAroundPtx),
                    "the NVIDIA driver is older than CUDA 13; install driver 580 or a later one");
  *old = 0;
  CHECK(skd::cuda_stream::KernelOf(skd::cuda_stream::LoadModule(skd::kTurnAroundPtx), "skd_turnaround_kernel") != nullptr);
}

TEST_CASE("threads take turns on the stream, and each records its own runs") {
  const auto work = [] {
    int launched = 0;
    for (int round = 0; round < 50; ++round) {
      std::byte* const memory = skd::cuda_stream::Allocate(kBytes);
      launched += GraphLaunchesInFiveRuns([] {});
      skd::cuda_stream::Free(memory);
    }
    return launched;
  };
  std::future<int> other = std::async(std::launch::async, work);
  CHECK(work() == 50 * 4);
  CHECK(other.get() == 50 * 4);
}
