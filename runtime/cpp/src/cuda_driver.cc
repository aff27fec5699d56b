#include "cuda_driver.h"

#include <dlfcn.h>

#include <string>

#include "error.h"
#include "library.h"

namespace skd::cuda_driver {
namespace {

constexpr Result kOutOfMemory = 2, kNewerPtx = 222;  // the latter: the driver is too old for a kernel's PTX version

template <typename Function>
void Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr) throw TargetError(std::string("the NVIDIA driver has no ") + name, "install a newer driver");
}

Driver Load() {
  void* library = OpenLibrary("", "libcuda.so.1", "the NVIDIA driver", "install it, or load the cpu target");
  Driver driver{};
  Result (*start)(unsigned flags) = nullptr;
  Result (*device_of)(int* device, int number) = nullptr;
  Result (*context_of)(void** context, int device) = nullptr;
  Find(library, "cuInit", &start);
  Find(library, "cuDeviceGet", &device_of);
  Find(library, "cuDevicePrimaryCtxRetain", &context_of);
  Find(library, "cuCtxSetCurrent", &driver.use);
  Find(library, "cuCtxCreate_v2", &driver.create_context);
  Find(library, "cuCtxDestroy_v2", &driver.destroy_context);
  Find(library, "cuCtxSynchronize", &driver.wait_for_context);
  Find(library, "cuGetErrorString", &driver.describe);
  Find(library, "cuMemAlloc_v2", &driver.allocate);
  Find(library, "cuMemFree_v2", &driver.free);
  Find(library, "cuMemAllocHost_v2", &driver.allocate_host);
  Find(library, "cuMemFreeHost", &driver.free_host);
  Find(library, "cuMemsetD8Async", &driver.set);
  Find(library, "cuMemcpyHtoDAsync_v2", &driver.send);
  Find(library, "cuMemcpyDtoHAsync_v2", &driver.receive);
  Find(library, "cuMemcpyDtoDAsync_v2", &driver.copy);
  Find(library, "cuStreamCreate", &driver.create_stream);
  Find(library, "cuEventCreate", &driver.create_event);
  Find(library, "cuEventDestroy_v2", &driver.destroy_event);
  Find(library, "cuEventRecord", &driver.record);
  Find(library, "cuEventSynchronize", &driver.wait);
  Find(library, "cuStreamBeginCapture_v2", &driver.begin_capture);
  Find(library, "cuStreamEndCapture", &driver.end_capture);
  Find(library, "cuGraphGetNodes", &driver.nodes);
  Find(library, "cuGraphNodeGetType", &driver.node_type);
  Find(library, "cuGraphMemcpyNodeGetParams", &driver.copy_of);
  Find(library, "cuPointerGetAttribute", &driver.attribute);
  Find(library, "cuGraphInstantiateWithFlags", &driver.instantiate);
  Find(library, "cuGraphLaunch", &driver.launch);
  Find(library, "cuGraphDestroy", &driver.destroy_graph);
  Find(library, "cuGraphExecDestroy", &driver.destroy_launchable);
  Find(library, "cuModuleLoadData", &driver.load);
  Find(library, "cuModuleGetFunction", &driver.kernel_of);
  Find(library, "cuLaunchKernel", &driver.launch_kernel);
  Check(driver, start(0));
  Check(driver, device_of(&driver.device, 0));
  Check(driver, context_of(&driver.context, driver.device));
  return driver;
}

}  // namespace

const Driver& Ready() {
  static const Driver driver = Load();
  Check(driver, driver.use(driver.context));
  return driver;
}

void Check(const Driver& driver, Result result) {
  if (result == 0) return;
  if (result == kOutOfMemory) {
    throw CapacityError("CUDA has no memory left", "ask for fewer rows, shorter prompts or fewer new tokens");
  }
  if (result == kNewerPtx) throw TargetError("the NVIDIA driver is older than CUDA 13", "install driver 580 or a later one");
  const char* text = nullptr;
  const bool described = driver.describe(result, &text) == 0 && text != nullptr;
  throw TargetError("the NVIDIA driver failed (" + (described ? std::string(text) : std::to_string(result)) + ")",
                    "check the GPU with nvidia-smi");
}

}  // namespace skd::cuda_driver
