// The GPU's memory and the process's one stream, which does all of its work in order: copies, and ONNX Runtime's runs.
//
// Any thread may call these functions. While one thread puts work on the stream, others wait, so that a graph records one
// thread's work only. All throw SKD_ERROR_TARGET if there is no driver or no GPU, or if it fails.
#pragma once

#include <cstddef>
#include <functional>

#include "cuda_driver.h"

namespace skd::cuda_stream {

using Calls = std::function<void()>;

// Allocate zeroed memory. Throws SKD_ERROR_CAPACITY if the GPU does not have this much left.
std::byte* Allocate(size_t bytes);
// Wait until nothing on the stream can use `memory` any more, then free it.
void Free(std::byte* memory) noexcept;
// Allocate zeroed, pinned memory on the host, which the GPU reads and writes directly. Throws SKD_ERROR_CAPACITY.
std::byte* AllocateHost(size_t bytes);
void FreeHost(std::byte* memory) noexcept;

// Copy from the host. `from` must not change until a later Receive or WaitForAll, or the Wait of an Event recorded later, has
// returned. (For memory not from AllocateHost a driver may copy it before Send returns, but NVIDIA does not promise that.)
void Send(std::byte* to, const void* from, size_t bytes);
// Copy to the host. Returns when this copy and all work put on the stream before it are done.
void Receive(void* to, const std::byte* from, size_t bytes);
void Copy(std::byte* to, const std::byte* from, size_t bytes);
void Clear(std::byte* memory, size_t bytes);
// Return when all work put on the stream so far is done.
void WaitForAll();

// The stream as a cudaStream_t, for ONNX Runtime.
void* Handle();
// Make calls that put work on the stream.
void Run(const Calls& calls);

// Load the kernels of `ptx`, which the driver compiles for this GPU. They stay loaded.
cuda_driver::Module* LoadModule(const char* ptx);
cuda_driver::Kernel* KernelOf(cuda_driver::Module* module, const char* name);
// `argument`: the kernel's only argument, read before this returns.
void Launch(cuda_driver::Kernel* kernel, unsigned blocks, unsigned threads, void* argument);

// A point in the stream's order of work.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  // Mark the point after all work put on the stream so far.
  void Record();
  // Wait until all work before that point is done. Other threads may put work on the stream meanwhile.
  void Wait() const;

 private:
  cuda_driver::Event* event_ = nullptr;
};

// A CUDA graph: recorded work, launched with one call.
class Graph {
 public:
  // Record what `calls` put on the stream, without doing it. Also throws what `calls` throw, and SKD_ERROR_TARGET if the work
  // calls the host or reads its memory: later launches would not notice that the host's data has changed.
  explicit Graph(const Calls& calls);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  // The recorded addresses must still be valid.
  void Launch() const;

 private:
  cuda_driver::Launchable* launchable_ = nullptr;
};

}  // namespace skd::cuda_stream
