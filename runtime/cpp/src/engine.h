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

// Load ONNX Runtime and make the process's one thread pool; the first call that succeeds decides both.
// `library`: its path, empty: found as the system finds libraries. `threads`: 0: one for each usable core. `check`: of the
// loaded library, which is let go where this throws and it was not the process's before.
// Throws SKD_ERROR_TARGET: no library, or one that is too old; SKD_ERROR_CAPACITY: more threads than any machine has.
void UseOnnxRuntime(
    const std::string& library, uint32_t threads, const std::function<void()>& check = [] {});

// "1.31.1" of the loaded library.
std::string OnnxRuntimeVersion();

enum class Device { kCpu, kCuda };

// Throws SKD_ERROR_TARGET where the loaded library was not built for `device`.
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

// What runs a binding: small, so that the calls of a step lie side by side. All throw what RunFailure makes of a failure.
struct Call {
  const Engine* engine;
  const OrtIoBinding* binding;
  Replay* replay;  // none on a CPU

  // On a GPU: puts it on the stream.
  void Run() const {
    if (replay == nullptr) return RunNow();
    cuda_stream::Run([this] { RunNow(); });
  }
  // As a step does, the same again and again. Returns whether it was the launch of a graph.
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
  // `optimized`: whether the graph is what ONNX Runtime makes of it; else that is done now, for this device.
  // `cuda_graphs`: whether calls that are repeated become CUDA graphs, on a GPU.
  // Throws SKD_ERROR_BUNDLE where the file cannot be loaded, SKD_ERROR_TARGET where the device cannot be used or not for all of
  // it, SKD_ERROR_CAPACITY where there is no memory for it.
  Engine(const std::filesystem::path& path, Device device, bool optimized, bool cuda_graphs);
  // As the file declares them: no addresses; -1 in a shape: any size.
  const std::vector<Tensor>& inputs() const { return inputs_; }
  const std::vector<Tensor>& outputs() const { return outputs_; }
  // Bind this with all inputs from now on: a weight that another engine reads too. The caller keeps its memory.
  void Share(Tensor weight) { shared_.push_back(std::move(weight)); }
  // Inputs that this engine does not read are left out. An output may be the same memory as an input.
  Binding Bind(const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs) const;

 private:
  friend class Binding;
  friend struct Call;
  std::string path_;
  Device device_;
  bool cuda_graphs_;
  Ort::RunOptions options_{nullptr};
  mutable Ort::Session session_;  // Run is const by ONNX Runtime's promise, not by its C++ type
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
