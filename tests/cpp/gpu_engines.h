// Engines of a GPU where there is none: ONNX Runtime's on the CPU, called as its CUDA provider is.
#pragma once

#include <string>

#include "engine.h"

// While one lives, ONNX Runtime says that it has CUDA, and a run is work on the stream of the stand-in for NVIDIA's driver
// (tests/standin/libcuda.cc), whose memory is the host's. One at a time; RefuseToLoad and StopAfter are for one thread.
class GpuEngines {
 public:
  GpuEngines();
  ~GpuEngines();
  GpuEngines(const GpuEngines&) = delete;
  GpuEngines& operator=(const GpuEngines&) = delete;

  // From now on loading fails, saying this; empty: it works again.
  void RefuseToLoad(const std::string& reason);
  // The same of runs, after so many more that work.
  void StopAfter(int runs, const std::string& reason);

 private:
  const OrtApi* real_;
  OrtApi patched_;
};
