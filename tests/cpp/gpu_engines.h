// GPU engines without a GPU: ONNX Runtime's engines on the CPU, called as its CUDA provider is.
#pragma once

#include <string>

#include "engine.h"

// While an instance exists, ONNX Runtime says that it has CUDA, and a run is work on the stream of the stand-in for NVIDIA's
// driver (tests/standin/libcuda.cc), whose memory is the host's. Only one may exist at a time. What makes it fail is not
// thread-safe.
class GpuEngines {
 public:
  GpuEngines();
  ~GpuEngines();
  GpuEngines(const GpuEngines&) = delete;
  GpuEngines& operator=(const GpuEngines&) = delete;

  // Make loading fail for this reason. Empty: it works again.
  void FailLoading(const std::string& reason);
  // Make runs fail for this reason, after `runs` more that work. Empty: they work again.
  void FailRunsAfter(int runs, const std::string& reason);
  // The same for binding tensors to an engine.
  void FailBindingAfter(int tensors, const std::string& reason);

 private:
  const OrtApi* real_;
  OrtApi patched_;
};
