// Stands in for CUDA's runtime, cuBLAS and cuRAND below the real onnxruntime-gpu, on top of the stand-in for the driver. ONNX
// Runtime's CUDA provider loads, reports which nodes it takes, chooses its kernels and makes all calls that it makes on a GPU.
// Kernels have names and compute nothing. Only what the provider calls is here, as far as inference on one GPU needs it.
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "libcuda.h"

namespace {

constexpr int kSharedMemory = 101376, kMultiprocessors = 128;  // of an RTX 4090 (compute capability 8.9)

int Capability() {
  const char* given = std::getenv("STANDIN_CAPABILITY");
  return given != nullptr ? std::atoi(given) : 89;
}

// A driver's error as the runtime's: they have the same numbers.
cudaError_t AsRuntimeError(CUresult code) { return static_cast<cudaError_t>(code); }

CUdeviceptr Address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// The driver's stream for one of the runtime's. Also makes the one context current on this thread.
CUstream DriverStream(cudaStream_t stream) {
  cuCtxSetCurrent(nullptr);
  static CUstream unnamed = [] {
    CUstream made = nullptr;
    cuStreamCreate(&made, 0);
    return made;
  }();
  return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread ? unnamed : stream;
}

// The kernels' names, by the host functions that launch them. Filled by static initialisers when the provider is loaded.
std::unordered_map<const void*, std::string>& KernelNames() {
  static auto& names = *new std::unordered_map<const void*, std::string>;
  return names;
}

std::string NameOf(const void* function) {
  const auto found = KernelNames().find(function);
  if (found == KernelNames().end()) return "a kernel of a library";
  char* readable = abi::__cxa_demangle(found->second.c_str(), nullptr, nullptr, nullptr);
  std::string name = readable != nullptr ? readable : found->second;
  std::free(readable);
  return name;
}

cudaError_t Launch(const std::string& name, cudaStream_t stream) {
  return AsRuntimeError(standin_kernel(DriverStream(stream), name.c_str()));
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

struct Blas {
  cudaStream_t stream = nullptr;
};

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return AsRuntimeError(cuCtxSetCurrent(nullptr)); }
cudaError_t cudaDriverGetVersion(int* version) { return AsRuntimeError(cuDriverGetVersion(version)); }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
  const std::unordered_map<int, int> known{{cudaDevAttrComputeCapabilityMajor, Capability() / 10},
                                           {cudaDevAttrComputeCapabilityMinor, Capability() % 10},
                                           {cudaDevAttrMultiProcessorCount, kMultiprocessors},
                                           {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
                                           {cudaDevAttrMaxSharedMemoryPerBlockOptin, kSharedMemory},
                                           {cudaDevAttrMaxSharedMemoryPerMultiprocessor, kSharedMemory + 1024},
                                           {cudaDevAttrMaxThreadsPerBlock, 1024},
                                           {cudaDevAttrWarpSize, 32}};
  const auto found = known.find(name);
  return *value = found == known.end() ? 0 : found->second, cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "no GPU");
  properties->major = Capability() / 10;
  properties->minor = Capability() % 10;
  properties->multiProcessorCount = kMultiprocessors;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxThreadsPerMultiProcessor = 1536;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = kSharedMemory;
  properties->sharedMemPerMultiprocessor = kSharedMemory + 1024;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->unifiedAddressing = properties->canMapHostMemory = properties->concurrentKernels = 1;
  size_t free = 0;
  return AsRuntimeError(cuMemGetInfo(&free, &properties->totalGlobalMem));
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "an error of the stand-in"; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "as the runtime would put it";
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return AsRuntimeError(cuMemGetInfo(free, total)); }
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  DriverStream(nullptr);  // makes the context current
  return bytes == 0 ? (*pointer = nullptr, cudaSuccess)
                    : AsRuntimeError(cuMemAlloc(reinterpret_cast<CUdeviceptr*>(pointer), bytes));
}
cudaError_t cudaFree(void* pointer) { return pointer == nullptr ? cudaSuccess : AsRuntimeError(cuMemFree(Address(pointer))); }
cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  DriverStream(nullptr);  // makes the context current
  return AsRuntimeError(cuMemAllocHost(pointer, bytes));
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) { return cudaMallocHost(pointer, bytes); }
cudaError_t cudaFreeHost(void* pointer) { return AsRuntimeError(cuMemFreeHost(pointer)); }
cudaError_t cudaMemPoolCreate(cudaMemPool_t*, const cudaMemPoolProps*) { return cudaErrorNotSupported; }
cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaErrorNotSupported; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaErrorNotSupported; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaErrorNotSupported; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaErrorNotSupported; }
cudaError_t cudaMallocFromPoolAsync(void**, size_t, cudaMemPool_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaFreeAsync(void*, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  const CUmemorytype type = standin_type_of(pointer);
  attributes->type = type == CU_MEMORYTYPE_DEVICE ? cudaMemoryTypeDevice
                     : type == CU_MEMORYTYPE_HOST ? cudaMemoryTypeHost
                                                  : cudaMemoryTypeUnregistered;
  attributes->devicePointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (kind == cudaMemcpyHostToDevice) return AsRuntimeError(cuMemcpyHtoDAsync(Address(to), from, bytes, DriverStream(stream)));
  if (kind == cudaMemcpyDeviceToHost) return AsRuntimeError(cuMemcpyDtoHAsync(to, Address(from), bytes, DriverStream(stream)));
  return AsRuntimeError(cuMemcpyDtoDAsync(Address(to), Address(from), bytes, DriverStream(stream)));
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (standin_capturing(DriverStream(stream))) return cudaErrorStreamCaptureUnsupported;
  CUevent event = nullptr;
  cuEventCreate(&event, 0);
  cuEventRecord(event, DriverStream(stream));
  cuEventSynchronize(event);
  return AsRuntimeError(cuEventDestroy(event));
}
cudaError_t cudaDeviceSynchronize() { return cudaStreamSynchronize(nullptr); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return error != cudaSuccess ? error : cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row) {
    const auto* source = static_cast<const char*>(from) + row * from_pitch;
    const cudaError_t error = cudaMemcpyAsync(static_cast<char*>(to) + row * to_pitch, source, width, kind, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpyFromSymbol(void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaErrorNotSupported; }
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  return bytes == 0
             ? cudaSuccess
             : AsRuntimeError(cuMemsetD8Async(Address(pointer), static_cast<unsigned char>(value), bytes, DriverStream(stream)));
}
cudaError_t cudaMemset(void* pointer, int value, size_t bytes) { return cudaMemsetAsync(pointer, value, bytes, nullptr); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return AsRuntimeError(cuStreamCreate(stream, 0)); }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }  // work is done in order
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return AsRuntimeError(cuEventCreate(event, 0)); }
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return AsRuntimeError(cuEventDestroy(event)); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return AsRuntimeError(cuEventRecord(event, DriverStream(stream)));
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return AsRuntimeError(cuEventSynchronize(event)); }
// All kernels are equally fast, for callers that measure which one is best.
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 1, cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  return AsRuntimeError(cuLaunchHostFunc(DriverStream(stream), call, data));
}

// The provider's own graphs, of one engine each, are not supported: this project captures its steps through the driver.
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = standin_capturing(DriverStream(stream)) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaErrorNotSupported; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) { return cudaErrorNotSupported; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long) { return cudaErrorNotSupported; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaErrorNotSupported; }

void** __cudaRegisterFatBinary(void* binary) { return new void*(binary); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void** handle) { delete handle; }
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  KernelNames()[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  return configurations.push_back({grid, block, shared, stream}), 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid, *block = last.block, *shared = last.shared;
  return *static_cast<cudaStream_t*>(stream) = last.stream, cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  const auto blocks = size_t{grid.x} * grid.y * grid.z, threads = size_t{block.x} * block.y * block.z;
  if (blocks == 0 || threads == 0 || threads > 1024 || shared > kSharedMemory) return cudaErrorInvalidConfiguration;
  return Launch(NameOf(function), stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                                        cudaStream_t stream) {
  return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* given, const void* function, void** arguments) {
  return cudaLaunchKernel(function, given->gridDim, given->blockDim, arguments, given->dynamicSmemBytes, given->stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function)), cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 64;
  attributes->binaryVersion = attributes->ptxVersion = Capability();
  attributes->maxDynamicSharedSizeBytes = kSharedMemory;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute name, int value) {
  return name == cudaFuncAttributeMaxDynamicSharedMemorySize && value > kSharedMemory ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  return *count = 2, cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = nullptr;
  return *found = cudaDriverEntryPointSymbolNotFound, cudaSuccess;
}
cudaError_t cudaLibraryLoadData(cudaLibrary_t*, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*, void**,
                                unsigned) {
  return cudaErrorNotSupported;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t*, cudaLibrary_t, const char*) { return cudaErrorNotSupported; }
cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaErrorNotSupported; }

// cuBLAS: every product is a kernel with the function's name.
int cublasCreate_v2(Blas** handle) { return *handle = new Blas, 0; }
int cublasDestroy_v2(Blas* handle) { return delete handle, 0; }
int cublasSetStream_v2(Blas* handle, cudaStream_t stream) { return handle->stream = stream, 0; }
int cublasGetMathMode(Blas*, int* mode) { return *mode = 0, 0; }
int cublasSetMathMode(Blas*, int) { return 0; }
const char* cublasGetStatusName(int) { return "a status of the stand-in"; }
const char* cublasGetStatusString(int) { return "as cuBLAS would put it"; }
#define KERNEL(name) \
  int name(Blas* handle, ...) { return Launch(#name, handle->stream); }
KERNEL(cublasGemmEx)
KERNEL(cublasGemmBatchedEx)
KERNEL(cublasGemmStridedBatchedEx)
KERNEL(cublasSgemm_v2)
KERNEL(cublasSgemmBatched)
KERNEL(cublasSgemmStridedBatched)
KERNEL(cublasSgeam)
KERNEL(cublasScopy_v2)
KERNEL(cublasSscal_v2)
// what no decoder uses
#define UNSUPPORTED(name) \
  int name(...) { return 15; }
UNSUPPORTED(cublasDgeam)
UNSUPPORTED(cublasDgemm_v2)
UNSUPPORTED(cublasDgemmBatched)
UNSUPPORTED(cublasDgemmStridedBatched)
UNSUPPORTED(cublasDgetrfBatched)
UNSUPPORTED(cublasDgetriBatched)
UNSUPPORTED(cublasSgetrfBatched)
UNSUPPORTED(cublasSgetriBatched)
int cublasLtCreate(Blas** handle) { return *handle = new Blas, 0; }
int cublasLtDestroy(Blas* handle) { return delete handle, 0; }
UNSUPPORTED(cublasLtMatmul)
UNSUPPORTED(cublasLtMatmulAlgoConfigSetAttribute)
UNSUPPORTED(cublasLtMatmulAlgoGetHeuristic)
UNSUPPORTED(cublasLtMatmulAlgoInit)
UNSUPPORTED(cublasLtMatmulDescCreate)
UNSUPPORTED(cublasLtMatmulDescDestroy)
UNSUPPORTED(cublasLtMatmulDescSetAttribute)
UNSUPPORTED(cublasLtMatmulPreferenceCreate)
UNSUPPORTED(cublasLtMatmulPreferenceDestroy)
UNSUPPORTED(cublasLtMatmulPreferenceSetAttribute)
UNSUPPORTED(cublasLtMatrixLayoutCreate)
UNSUPPORTED(cublasLtMatrixLayoutDestroy)
UNSUPPORTED(cublasLtMatrixLayoutSetAttribute)
UNSUPPORTED(cublasLtMatrixTransform)
UNSUPPORTED(cublasLtMatrixTransformDescCreate)
UNSUPPORTED(cublasLtMatrixTransformDescDestroy)
}
