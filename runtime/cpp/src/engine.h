// Engines on ONNX Runtime: one global thread pool, inputs and outputs bound to fixed addresses.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

namespace skd {

// Cores that this process may use.
int CoresOfThisProcess();

// Load ONNX Runtime and make the process's one thread pool; the first call decides both.
// `library`: its path, empty: found as the system finds libraries. `threads`: 0: one a core.
// Throws SKD_ERROR_TARGET: no library, or one that is too old.
void UseOnnxRuntime(const std::string& library, uint32_t threads);

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

class Binding;

// What runs a binding: small, so that the calls of a step lie side by side.
struct Call {
  OrtSession* session;
  const OrtIoBinding* binding;
  void Run() const { Ort::ThrowOnError(Ort::GetApi().RunWithBinding(session, nullptr, binding)); }
};

// A compiled graph; may be run from several threads at once, each through bindings of its own.
class Engine {
 public:
  // `optimized`: whether the graph is what ONNX Runtime makes of it; else that is done now, for this device.
  // Throws SKD_ERROR_BUNDLE where the file cannot be loaded, SKD_ERROR_TARGET where the device cannot be used.
  Engine(const std::filesystem::path& path, Device device, bool optimized);
  // Bind this with all inputs from now on: a weight that another engine reads too. The caller keeps its memory.
  void Share(Tensor weight) { shared_.push_back(std::move(weight)); }
  // Inputs that this engine does not read are left out. An output may be the same memory as an input.
  Binding Bind(const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs) const;

 private:
  friend class Binding;
  mutable Ort::Session session_;  // Run is const by ONNX Runtime's promise, not by its C++ type
  std::unordered_set<std::string> input_names_;
  std::vector<Tensor> shared_;
};

// An engine bound to addresses.
class Binding {
 public:
  void Run() const { call().Run(); }
  // Valid as long as this binding and its engine are.
  Call call() const { return {*session_, binding_}; }

 private:
  friend class Engine;
  explicit Binding(Ort::Session* session) : session_(session), binding_(*session) {}
  Ort::Session* session_;
  Ort::IoBinding binding_;
};

}  // namespace skd
