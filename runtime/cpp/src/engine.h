// Engines on ONNX Runtime: one global thread pool, inputs and outputs bound to fixed addresses.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

#include "replay.h"

namespace skd {

// Load ONNX Runtime and create the process's one thread pool. The first call that succeeds decides both.
// `library`: its path; empty: where the system looks for libraries. `threads`: 0: one for each usable core.
// `check`: inspects the loaded library; if it throws, a library that this call has loaded is closed again.
// Throws SKD_ERROR_TARGET if there is no library or it is too old, SKD_ERROR_CAPACITY for more than 1024 threads.
void UseOnnxRuntime(
    const std::string& library, uint32_t threads, const std::function<void()>& check = [] {});

// "1.31.1" of the loaded library.
std::string OnnxRuntimeVersion();

enum class Device { kCpu, kCuda };

// Throws SKD_ERROR_TARGET if the loaded library was not built for `device`.
void CheckProvider(Device device);

// A tensor at a fixed address, owned by the caller.
struct Tensor {
  std::string name;
  void* data;
  std::vector<int64_t> shape;
  ONNXTensorElementDataType type;
  Device device = Device::kCpu;
};

// Bytes of an element.
size_t SizeOf(ONNXTensorElementDataType type);

class Engine;

// Runs a binding. Small, so that the calls of a step lie close together. Throws what RunFailure returns if the run fails.
struct Call {
  const Engine* engine;
  const OrtIoBinding* binding;
  Replay* replay;  // NULL on a CPU

  // On a GPU this puts the run on the stream and does not wait for it.
  void Run() const {
    if (replay == nullptr) return RunNow();
    cuda_stream::Run([this] { RunNow(); });
  }
  // The same for a run that decode steps repeat, which may become a CUDA graph. Returns whether a graph was launched.
  bool Repeat() const {
    if (replay != nullptr) return replay->Run([this] { RunNow(); });
    RunNow();
    return false;
  }
  void RunNow() const;
};

class Binding;

// A compiled graph; may be run from several threads at once, each through bindings of its own.
class Engine {
 public:
  // `optimized`: whether the file holds a graph that ONNX Runtime has optimised; otherwise it does so now, for this device.
  // `cuda_graphs`: whether repeated runs become CUDA graphs, on a GPU.
  // Throws SKD_ERROR_BUNDLE if the file cannot be loaded, SKD_ERROR_TARGET if the device cannot be used or cannot run the
  // whole graph, SKD_ERROR_CAPACITY if there is no memory for it.
  Engine(const std::filesystem::path& path, Device device, bool optimized, bool cuda_graphs);
  // As the file declares them, without addresses; -1 in a shape: any size.
  const std::vector<Tensor>& inputs() const { return inputs_; }
  const std::vector<Tensor>& outputs() const { return outputs_; }
  // Bind `weight`, which another engine reads too, along with the inputs of every later Bind. The caller owns its memory.
  void Share(Tensor weight) { shared_.push_back(std::move(weight)); }
  // Inputs that this engine does not read are left out. An output may be the same memory as an input. Throws what RunFailure
  // returns if ONNX Runtime cannot bind them, as without memory.
  Binding Bind(const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs) const;

 private:
  friend class Binding;
  friend struct Call;
  std::string path_;
  Device device_;
  bool cuda_graphs_;
  Ort::RunOptions options_{nullptr};
  mutable Ort::Session session_;  // ONNX Runtime promises that Run is const; its C++ type does not say so
  std::vector<Tensor> inputs_, outputs_;
  std::unordered_set<std::string> input_names_;
  std::vector<Tensor> shared_;
};

// An engine bound to addresses.
class Binding {
 public:
  void Run() const { call().Run(); }
  // Valid as long as this binding and its engine are.
  Call call() const { return {engine_, binding_, replay_.get()}; }

 private:
  friend class Engine;
  explicit Binding(const Engine* engine) : engine_(engine), binding_(engine->session_) {
    if (engine->device_ == Device::kCuda) replay_ = std::make_unique<Replay>(engine->cuda_graphs_);
  }
  const Engine* engine_;
  Ort::IoBinding binding_;
  std::unique_ptr<Replay> replay_;
};

}  // namespace skd
