#include "gpu_engines.h"

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "cuda_stream.h"
#include "standin_driver.h"

namespace {

// What the functions below share. It is global, because ONNX Runtime's functions are given no GpuEngines.
struct Shared {
  const OrtApi* real = nullptr;
  std::deque<int32_t> host_inputs;  // copies of what runs read on the host: it may change once a run is enqueued
  std::string loading_failure, run_failure, binding_failure;  // why loading, running or binding fails; empty: it works
  int runs_left = 0, tensors_left = 0;
};
Shared shared;
std::mutex mutex;                  // guards what threads share
thread_local bool on_gpu = false;  // whether the last memory described was the GPU's

// Enqueue work, which is done when the stream comes to it: once, or if captured in a graph at each of its launches.
void PutOnStream(std::function<void()> work) {
  static auto* const launch = Driver<int(void*, void (*)(void*), void*)>("standin_launch");
  static std::deque<std::function<void()>> kept;
  const std::lock_guard<std::mutex> lock(mutex);
  kept.push_back(std::move(work));
  const auto call = [](void* data) { (*static_cast<std::function<void()>*>(data))(); };
  if (launch(skd::cuda_stream::Handle(), call, &kept.back()) != 0) throw std::logic_error("the stream takes no work");
}

OrtStatusPtr Failure(const std::string& reason) { return shared.real->CreateStatus(ORT_FAIL, reason.c_str()); }

OrtStatusPtr GetProviders(char*** names, int* count) noexcept {
  static char name[] = "CUDAExecutionProvider";
  static char* all[] = {name};
  *names = all;
  *count = 1;
  return nullptr;
}
OrtStatusPtr ReleaseProviders(char** /*names*/, int /*count*/) noexcept { return nullptr; }

OrtStatusPtr CreateCuda(OrtCUDAProviderOptionsV2** options) noexcept {
  static char nobody_looks_inside;
  return *options = reinterpret_cast<OrtCUDAProviderOptionsV2*>(&nobody_looks_inside), nullptr;
}
OrtStatusPtr UpdateCuda(OrtCUDAProviderOptionsV2* /*options*/, const char* const* /*keys*/, const char* const* /*values*/,
                        size_t /*count*/) noexcept {
  return nullptr;
}
OrtStatusPtr UpdateCudaWithValue(OrtCUDAProviderOptionsV2* /*options*/, const char* /*key*/, void* /*value*/) noexcept {
  return nullptr;
}
void ReleaseCuda(OrtCUDAProviderOptionsV2* /*options*/) noexcept {}
OrtStatusPtr AppendCuda(OrtSessionOptions* /*options*/, const OrtCUDAProviderOptionsV2* /*cuda*/) noexcept { return nullptr; }

// Drops the option that forbids leaving nodes to the CPU, because here all are.
OrtStatusPtr AddEntry(OrtSessionOptions* options, const char* key, const char* value) noexcept {
  if (std::strcmp(key, "session.disable_cpu_ep_fallback") == 0) return nullptr;
  return shared.real->AddSessionConfigEntry(options, key, value);
}

OrtStatusPtr CreateSession(const OrtEnv* environment, const char* path, const OrtSessionOptions* options,
                           OrtSession** session) noexcept {
  if (!shared.loading_failure.empty()) return Failure(shared.loading_failure);
  return shared.real->CreateSession(environment, path, options, session);
}

OrtStatusPtr CreateMemory(const char* name, OrtAllocatorType kind, int number, OrtMemType type, OrtMemoryInfo** info) noexcept {
  on_gpu = std::strcmp(name, "Cuda") == 0;
  return shared.real->CreateMemoryInfo("Cpu", kind, number, type, info);
}

OrtStatusPtr CreateTensor(const OrtMemoryInfo* info, void* data, size_t bytes, const int64_t* shape, size_t rank,
                          ONNXTensorElementDataType type, OrtValue** value) noexcept {
  if (!shared.binding_failure.empty() && shared.tensors_left-- <= 0) return Failure(shared.binding_failure);
  if (!on_gpu) {
    const std::lock_guard<std::mutex> lock(mutex);
    data = &shared.host_inputs.emplace_back(*static_cast<const int32_t*>(data));
  }
  return shared.real->CreateTensorWithDataAsOrtValue(info, data, bytes, shape, rank, type, value);
}

OrtStatusPtr Run(OrtSession* session, const OrtRunOptions* options, const OrtIoBinding* binding) noexcept {
  if (!shared.run_failure.empty() && shared.runs_left-- <= 0) return Failure(shared.run_failure);
  PutOnStream([=] { Ort::ThrowOnError(shared.real->RunWithBinding(session, options, binding)); });
  return nullptr;
}

void Release(OrtIoBinding* binding) {
  // in its turn on the stream, so that it is not captured in another thread's graph
  skd::cuda_stream::Run([binding] { PutOnStream([binding] { shared.real->ReleaseIoBinding(binding); }); });
}

}  // namespace

GpuEngines::GpuEngines() : real_(&Ort::GetApi()), patched_(*real_) {
  shared = Shared();
  shared.real = real_;
  patched_.GetAvailableProviders = GetProviders;
  patched_.ReleaseAvailableProviders = ReleaseProviders;
  patched_.CreateCUDAProviderOptions = CreateCuda;
  patched_.UpdateCUDAProviderOptions = UpdateCuda;
  patched_.UpdateCUDAProviderOptionsWithValue = UpdateCudaWithValue;
  patched_.ReleaseCUDAProviderOptions = ReleaseCuda;
  patched_.SessionOptionsAppendExecutionProvider_CUDA_V2 = AppendCuda;
  patched_.AddSessionConfigEntry = AddEntry;
  patched_.CreateSession = CreateSession;
  patched_.CreateMemoryInfo = CreateMemory;
  patched_.CreateTensorWithDataAsOrtValue = CreateTensor;
  patched_.RunWithBinding = Run;
  patched_.ReleaseIoBinding = Release;
  Ort::InitApi(&patched_);
}

GpuEngines::~GpuEngines() { Ort::InitApi(real_); }

void GpuEngines::FailLoading(const std::string& reason) { shared.loading_failure = reason; }

void GpuEngines::FailRunsAfter(int runs, const std::string& reason) {
  shared.runs_left = runs;
  shared.run_failure = reason;
}

void GpuEngines::FailBindingAfter(int tensors, const std::string& reason) {
  shared.tensors_left = tensors;
  shared.binding_failure = reason;
}
