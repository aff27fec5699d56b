#include "engine.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "cores.h"
#include "engine_failure.h"
#include "error.h"
#include "library.h"

namespace skd {
namespace {

Ort::Value View(const Tensor& tensor) {
  size_t bytes = SizeOf(tensor.type);
  for (const int64_t size : tensor.shape) bytes *= static_cast<size_t>(size);
  const char* place = tensor.device == Device::kCpu ? "Cpu" : "Cuda";
  const Ort::MemoryInfo memory(place, OrtDeviceAllocator, 0, OrtMemTypeDefault);
  return Ort::Value::CreateTensor(memory, tensor.data, bytes, tensor.shape.data(), tensor.shape.size(), tensor.type);
}

// An input or output as a graph declares it.
Tensor Declared(const char* name, const Ort::TypeInfo& info) {
  Tensor tensor{name, nullptr, {}, ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED};
  if (info.GetONNXType() != ONNX_TYPE_TENSOR) return tensor;
  const auto declared = info.GetTensorTypeAndShapeInfo();
  tensor.shape = declared.GetShape();
  tensor.type = declared.GetElementType();
  return tensor;
}

// The process's one ONNX Runtime environment, with its thread pool. Never destroyed, because other threads may still run
// engines when static objects are destroyed.
const Ort::Env* environment = nullptr;
const OrtApiBase* api_base = nullptr;
std::mutex environment_mutex;

// An open library, closed again unless it is accepted: if it stayed open, a later call without a path would get it too.
using Opened = std::unique_ptr<void, int (*)(void*)>;

Opened LoadApi(const std::string& library) {
  const std::string remedy = "install it, set LD_LIBRARY_PATH, or name it in skd_load_options.onnxruntime_library";
  Opened opened(OpenLibrary(library, "libonnxruntime.so.1", "ONNX Runtime", remedy), dlclose);
  using GetApiBase = const OrtApiBase* (*)();
  const auto get = reinterpret_cast<GetApiBase>(dlsym(opened.get(), "OrtGetApiBase"));
  if (get == nullptr) throw TargetError("is not ONNX Runtime", remedy, PathOf(opened.get()));
  const OrtApi* api = get()->GetApi(ORT_API_VERSION);
  if (api == nullptr) {
    const std::string version = get()->GetVersionString(), wanted = std::to_string(ORT_API_VERSION);
    throw TargetError("is ONNX Runtime " + version + ", too old for API " + wanted, "install a newer one", PathOf(opened.get()));
  }
  api_base = get();
  Ort::InitApi(api);
  return opened;
}

// The first makes adjacent slices (Phi-3's query, key, value) an uneven Split, which copies from the host's memory in each
// run and so cannot be part of a CUDA graph. The second moves a bias into a product with quantised weights, which rules out
// CUTLASS's kernels.
constexpr char kDisabledOptimizers[] = "GatherSliceToSplitFusion;MatMulNBitsFusion";

void UseCuda(Ort::SessionOptions& options) {
  const OrtApi& api = Ort::GetApi();
  OrtCUDAProviderOptionsV2* cuda = nullptr;
  try {
    Ort::ThrowOnError(api.CreateCUDAProviderOptions(&cuda));
    const std::unique_ptr<OrtCUDAProviderOptionsV2, decltype(api.ReleaseCUDAProviderOptions)> owner(
        cuda, api.ReleaseCUDAProviderOptions);
    // by default an arena doubles what it takes each time, which for weights is up to twice their size
    const char *const key = "arena_extend_strategy", *const value = "kSameAsRequested";
    Ort::ThrowOnError(api.UpdateCUDAProviderOptions(cuda, &key, &value, 1));
    Ort::ThrowOnError(api.UpdateCUDAProviderOptionsWithValue(cuda, "user_compute_stream", cuda_stream::Handle()));
    options.AddConfigEntry("session.use_device_allocator_for_initializers", "1");
    options.AddConfigEntry("session.disable_cpu_ep_fallback", "1");  // a node on the CPU would make each step wait
    options.AddConfigEntry("optimization.disable_specified_optimizers", kDisabledOptimizers);
    options.AppendExecutionProvider_CUDA_V2(*cuda);
  } catch (const Ort::Exception& error) {
    throw TargetError("ONNX Runtime cannot use cuda on this machine (" + Reason(error.what()) + ")",
                      "check the driver and CUDA's libraries with nvidia-smi");
  }
}

}  // namespace

void UseOnnxRuntime(const std::string& library, uint32_t threads, const std::function<void()>& check) {
  constexpr uint32_t kMostThreads = 1024;  // ONNX Runtime hangs if the system starts no more
  if (threads > kMostThreads) {
    throw CapacityError(std::to_string(threads) + " is out of range",
                        "choose 1.." + std::to_string(kMostThreads) + ", or 0: one a core", "threads");
  }
  const std::lock_guard<std::mutex> lock(environment_mutex);
  if (environment != nullptr) return check();
  Opened opened = LoadApi(library);
  check();
  opened.release();  // NOLINT(bugprone-unused-return-value): the library stays loaded
  try {
    Ort::ThreadingOptions pool;
    pool.SetGlobalIntraOpNumThreads(threads > 0 ? static_cast<int>(threads) : UsableCores());
    pool.SetGlobalInterOpNumThreads(1);
    auto made = std::make_unique<Ort::Env>(pool, ORT_LOGGING_LEVEL_ERROR, "skipdecode");
    made->DisableTelemetryEvents();  // about models as they are loaded; about the process: docs/cpp.md
    // one arena for all engines: with one each, every engine would keep the memory that the longest prompt took in it
    const Ort::ArenaCfg defaults(0, -1, -1, -1);
    made->CreateAndRegisterAllocator(Ort::MemoryInfo("Cpu", OrtArenaAllocator, 0, OrtMemTypeDefault), defaults);
    environment = made.release();
  } catch (const Ort::Exception& error) {
    if (std::strstr(error.what(), "pthread_create failed") != nullptr) {
      throw CapacityError("the system cannot start that many for ONNX Runtime", "choose fewer threads, or raise ulimit -u",
                          "threads");
    }
    throw TargetError(std::string("ONNX Runtime cannot start: ") + error.what(), "check its installation");
  }
}

std::string OnnxRuntimeVersion() { return api_base->GetVersionString(); }

void CheckProvider(Device device) {
  if (device == Device::kCpu) return;
  const std::vector<std::string> providers = Ort::GetAvailableProviders();
  if (std::find(providers.begin(), providers.end(), "CUDAExecutionProvider") == providers.end()) {
    throw TargetError("the loaded onnxruntime " + OnnxRuntimeVersion() + " is built without CUDA",
                      "name one with CUDA in skd_load_options.onnxruntime_library (onnxruntime-gpu's)");
  }
}

size_t SizeOf(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return 2;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return 4;
    default:
      return 8;
  }
}

void Call::RunNow() const {
  const Ort::Status failed(Ort::GetApi().RunWithBinding(engine->session_, engine->options_, binding));
  if (!failed.IsOK()) throw RunFailure(failed.GetErrorMessage(), replay != nullptr, engine->path_);
}

Engine::Engine(const std::filesystem::path& path, Device device, bool optimized, bool cuda_graphs)
    : path_(path.string()), device_(device), cuda_graphs_(cuda_graphs), session_(nullptr) {
  Ort::SessionOptions options;
  options.DisablePerSessionThreads();
  options.AddConfigEntry("session.use_env_allocators", "1");
  options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_FATAL);  // its errors also arrive as statuses, which become ours
  options.SetGraphOptimizationLevel(optimized ? ORT_DISABLE_ALL : ORT_ENABLE_ALL);
  if (device == Device::kCuda) {
    UseCuda(options);
    options_ = Ort::RunOptions();
    options_.AddConfigEntry("disable_synchronize_execution_providers", "1");  // callers wait for results, not for runs
  }
  try {
    session_ = Ort::Session(*environment, path.c_str(), options);
    Ort::AllocatorWithDefaultOptions allocator;
    for (size_t i = 0; i < session_.GetInputCount(); ++i) {
      inputs_.push_back(Declared(session_.GetInputNameAllocated(i, allocator).get(), session_.GetInputTypeInfo(i)));
      input_names_.insert(inputs_.back().name);
    }
    for (size_t i = 0; i < session_.GetOutputCount(); ++i) {
      outputs_.push_back(Declared(session_.GetOutputNameAllocated(i, allocator).get(), session_.GetOutputTypeInfo(i)));
    }
  } catch (const Ort::Exception& error) {
    throw LoadFailure(error.what(), path_);
  }
}

Binding Engine::Bind(const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs) const {
  try {
    Binding bound(this);
    for (const auto* given : {&inputs, &shared_}) {
      for (const Tensor& tensor : *given) {
        if (input_names_.count(tensor.name) > 0) bound.binding_.BindInput(tensor.name.c_str(), View(tensor));
      }
    }
    for (const Tensor& tensor : outputs) bound.binding_.BindOutput(tensor.name.c_str(), View(tensor));
    return bound;
  } catch (const Ort::Exception& error) {
    throw RunFailure(error.what(), device_ == Device::kCuda, path_);
  }
}

}  // namespace skd
