// The GPU's memory and its one stream, on which this process's work follows in its order: copies, and ONNX Runtime's runs.
//
// Any thread may call these; one waits while another's work is put on the stream, so that what is recorded for a graph is one
// thread's alone. All throw SKD_ERROR_TARGET where there is no driver or no GPU, or where it fails.
#pragma once

#include <cstddef>
#include <functional>

#include "cuda_driver.h"

namespace skd::cuda_stream {

using Calls = std::function<void()>;

// Zeros. Throws SKD_ERROR_CAPACITY where the GPU has not this much memory.
std::byte* Allocate(size_t bytes);
// Returns when nothing on the stream can need it any more.
void Free(std::byte* memory) noexcept;
// Zeros on the host, which the GPU reads and writes by itself. Throws SKD_ERROR_CAPACITY.
std::byte* AllocateHost(size_t bytes);
void FreeHost(std::byte* memory) noexcept;

// From the host. `from` must stay as it is until somebody has waited for what was asked for after it: Receive, WaitForAll, an
// Event's Wait. (Of memory that is not AllocateHost's a driver may keep a copy, which NVIDIA does not promise.)
void Send(std::byte* to, const void* from, size_t bytes);
// To the host; returns when it is there, and everything that was asked for before is done.
void Receive(void* to, const std::byte* from, size_t bytes);
void Copy(std::byte* to, const std::byte* from, size_t bytes);
void Clear(std::byte* memory, size_t bytes);
// Returns when everything that was asked for is done.
void WaitForAll();

// A cudaStream_t, for ONNX Runtime.
void* Handle();
// Calls that put work on the stream.
void Run(const Calls& calls);

// The kernels of `ptx`, which the driver compiles for the GPU at hand; stay loaded.
cuda_driver::Module* LoadModule(const char* ptx);
cuda_driver::Kernel* KernelOf(cuda_driver::Module* module, const char* name);
// `argument`: its only one, which is read before this returns.
void Launch(cuda_driver::Kernel* kernel, unsigned blocks, unsigned threads, void* argument);

// A place on the stream.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  // Behind everything that was asked for so far.
  void Record();
  // Until everything before it is done. Other threads put their work on the stream meanwhile.
  void Wait() const;

 private:
  cuda_driver::Event* event_ = nullptr;
};

// Recorded work, launched in one go.
class Graph {
 public:
  // Records what `calls` put on the stream, which is not done. Also throws what they throw, and SKD_ERROR_TARGET where it needs
  // what the host has now: a launch would not notice that it has changed.
  explicit Graph(const Calls& calls);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  // The addresses that were recorded must still be valid.
  void Launch() const;

 private:
  cuda_driver::Launchable* launchable_;
};

}  // namespace skd::cuda_stream
