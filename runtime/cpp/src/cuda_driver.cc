#include "cuda_driver.h"

#include <dlfcn.h>

#include <string>

#include "error.h"
#include "library.h"

namespace skd::cuda_driver {
namespace {

// as cuda.h has them
using Result = int;
using Address = unsigned long long;  // NOLINT(google-runtime-int)
constexpr Result kOutOfMemory = 2;

struct Driver {
  Result (*use)(void* context);
  Result (*allocate)(Address* memory, size_t bytes);
  Result (*free)(Address memory);
  Result (*set)(Address memory, unsigned char value, size_t bytes);
  Result (*send)(Address to, const void* from, size_t bytes);
  Result (*receive)(void* to, Address from, size_t bytes);
  Result (*copy)(Address to, Address from, size_t bytes);
  Result (*wait)();
  Result (*describe)(Result error, const char** text);
  void* context;  // the device's primary one, which ONNX Runtime uses too
};

template <typename Function>
void Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr) throw TargetError(std::string("the NVIDIA driver has no ") + name, "install a newer driver");
}

void Check(const Driver& driver, Result result) {
  if (result == 0) return;
  const char* text = nullptr;
  const bool described = driver.describe(result, &text) == 0 && text != nullptr;
  throw TargetError("the NVIDIA driver fails (" + (described ? std::string(text) : std::to_string(result)) + ")",
                    "check the GPU with nvidia-smi");
}

Driver Load() {
  void* library = OpenLibrary("", "libcuda.so.1", "the NVIDIA driver", "install it, or load the cpu target");
  Driver driver{};
  Result (*start)(unsigned flags);
  Result (*device_of)(int* device, int number);
  Result (*context_of)(void** context, int device);
  Find(library, "cuInit", &start);
  Find(library, "cuDeviceGet", &device_of);
  Find(library, "cuDevicePrimaryCtxRetain", &context_of);
  Find(library, "cuCtxSetCurrent", &driver.use);
  Find(library, "cuMemAlloc_v2", &driver.allocate);
  Find(library, "cuMemFree_v2", &driver.free);
  Find(library, "cuMemsetD8_v2", &driver.set);
  Find(library, "cuMemcpyHtoD_v2", &driver.send);
  Find(library, "cuMemcpyDtoH_v2", &driver.receive);
  Find(library, "cuMemcpyDtoD_v2", &driver.copy);
  Find(library, "cuCtxSynchronize", &driver.wait);
  Find(library, "cuGetErrorString", &driver.describe);
  int device = 0;
  Check(driver, start(0));
  Check(driver, device_of(&device, 0));
  Check(driver, context_of(&driver.context, device));
  return driver;
}

// Ready to be called on this thread.
const Driver& Ready() {
  static const Driver driver = Load();
  Check(driver, driver.use(driver.context));
  return driver;
}

Address Of(const std::byte* memory) { return reinterpret_cast<Address>(memory); }

// Copies and sets may return before they are done, and ONNX Runtime's streams do not wait for them.
void Finish(const Driver& driver, Result result) {
  Check(driver, result);
  Check(driver, driver.wait());
}

}  // namespace

std::byte* Allocate(size_t bytes) {
  const Driver& driver = Ready();
  Address memory = 0;
  const Result result = driver.allocate(&memory, bytes);
  if (result == kOutOfMemory) {
    throw CapacityError("the GPU has no " + std::to_string(bytes >> 20) + " MiB left for a buffer",
                        "ask for fewer rows, shorter prompts or fewer new tokens");
  }
  Check(driver, result);
  Finish(driver, driver.set(memory, 0, bytes));
  return reinterpret_cast<std::byte*>(memory);  // NOLINT(performance-no-int-to-ptr): the driver's addresses are integers
}

void Free(std::byte* memory) noexcept {
  try {
    Ready().free(Of(memory));
  } catch (...) {  // the driver is gone, and its memory with it
  }
}

void Send(std::byte* to, const void* from, size_t bytes) {
  const Driver& driver = Ready();
  Finish(driver, driver.send(Of(to), from, bytes));
}

void Receive(void* to, const std::byte* from, size_t bytes) {
  const Driver& driver = Ready();
  Finish(driver, driver.receive(to, Of(from), bytes));
}

void Copy(std::byte* to, const std::byte* from, size_t bytes) {
  const Driver& driver = Ready();
  Finish(driver, driver.copy(Of(to), Of(from), bytes));
}

}  // namespace skd::cuda_driver
