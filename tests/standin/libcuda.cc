// Stands in for NVIDIA's driver on machines without one. The GPU's memory is host memory, and graphs replay what was enqueued
// while they were captured. Work is done in order and as late as a driver may do it, when somebody waits for it, so that pinned
// memory which is changed too early is read with its new content. Only what runtime/cuda.py and runtime/cpp call is here. It
// computes nothing but the turn-around (its host version). It shows that the calls fit together, not how fast a GPU is.
#include "libcuda.h"

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../../plugins/turnaround/turnaround.h"

using Work = std::function<void()>;
struct CUgraphNode_st {
  Work work;
  CUgraphNodeType type;
  uintptr_t source = 0;   // of a copy
  std::string name = {};  // of a kernel
};
struct CUgraph_st {
  std::vector<CUgraphNode_st> nodes;
};
struct CUgraphExec_st {
  std::vector<CUgraphNode_st> nodes;
};
struct CUstream_st {
  CUgraph capture = nullptr;
};
struct CUevent_st {
  std::atomic<uint64_t> after{0};  // complete when this much work is done
};

// For tests: calls that take memory, or put work on a stream, and still work before they fail; below 0: all work. How many then
// fail before they work again, and with which CUresult. Calls that wait or release never fail: without them all would be lost.
extern "C" {
int standin_calls_left = -1, standin_failures_left = 0, standin_failure = CUDA_ERROR_OUT_OF_MEMORY;
}

namespace {

constexpr size_t kMemoryBytes = size_t{1} << 30;      // bytes of GPU memory
thread_local bool context_is_current = false;         // whether this thread made the context current
const auto kNothing = reinterpret_cast<CUmodule>(2);  // the module whose kernel does nothing
struct Block {
  size_t bytes;
  CUmemorytype type;
};
std::map<uintptr_t, Block> blocks;
std::mutex blocks_mutex;  // several threads load engines
std::atomic<size_t> taken_bytes{0};
struct Alive {
  std::atomic<int> contexts{0}, streams{0}, events{0}, modules{0}, graphs{0}, launchables{0};
};
Alive alive;  // objects that were created and not destroyed; modules: those with the turn-around
std::mutex failing_mutex;
int num_launches = 0;
int num_events = 0;            // that were created
int num_other_objects = 0;     // streams and modules with the turn-around that were created
std::atomic<int> num_sent{0};  // copies from the host
std::string last_graph_nodes;  // the last graph's nodes, one per line

// The work of all streams that nobody has waited for yet. Never destroyed, because memory may be freed late.
struct Queue {
  std::recursive_mutex mutex;  // recursive: work that calls Python may collect garbage, which frees memory
  std::deque<Work> waiting;
  uint64_t num_queued = 0, num_done = 0;
};
Queue& queue = *new Queue;

void PutInQueue(Work work) {
  const std::lock_guard<std::recursive_mutex> lock(queue.mutex);
  queue.waiting.push_back(std::move(work));
  ++queue.num_queued;
}

uint64_t NumQueued() {
  const std::lock_guard<std::recursive_mutex> lock(queue.mutex);
  return queue.num_queued;
}

void WaitFor(uint64_t count) {
  const std::lock_guard<std::recursive_mutex> lock(queue.mutex);
  while (queue.num_done < count) {
    const Work work = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    ++queue.num_done;
    work();
  }
}

// What a call that takes memory, or puts work on a stream, returns at once unless it is CUDA_SUCCESS.
CUresult Failure() {
  const std::lock_guard<std::mutex> lock(failing_mutex);
  if (standin_calls_left != 0) return standin_calls_left -= standin_calls_left > 0 ? 1 : 0, CUDA_SUCCESS;
  if (standin_failures_left == 0) return CUDA_SUCCESS;
  return --standin_failures_left, static_cast<CUresult>(standin_failure);
}

CUresult Enqueue(CUstream stream, CUgraphNode_st node) {
  if (!context_is_current) return CUDA_ERROR_INVALID_CONTEXT;
  if (stream->capture != nullptr)
    stream->capture->nodes.push_back(std::move(node));
  else
    PutInQueue(std::move(node.work));
  return CUDA_SUCCESS;
}

CUresult Copy(uintptr_t to, uintptr_t from, size_t bytes, CUstream stream) {
  const Work work = [=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes); };
  return Enqueue(stream, {work, CU_GRAPH_NODE_TYPE_MEMCPY, from});
}

std::optional<Block> BlockOf(uintptr_t pointer) {
  const std::lock_guard<std::mutex> lock(blocks_mutex);
  auto next = blocks.upper_bound(pointer);
  if (next == blocks.begin()) return std::nullopt;
  const auto& [start, block] = *--next;
  return pointer < start + block.bytes ? std::optional(block) : std::nullopt;
}

bool HasMemoryType(const void* pointer, CUmemorytype type) {
  const auto block = BlockOf(reinterpret_cast<uintptr_t>(pointer));
  return block && block->type == type;
}

CUresult Allocate(uintptr_t* pointer, size_t bytes, CUmemorytype type) {
  if (!context_is_current) return CUDA_ERROR_INVALID_CONTEXT;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult failed = Failure()) return failed;
  const std::lock_guard<std::mutex> lock(blocks_mutex);
  if (bytes > kMemoryBytes - taken_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  *pointer = reinterpret_cast<uintptr_t>(std::aligned_alloc(512, (bytes + 511) / 512 * 512));
  std::memset(reinterpret_cast<void*>(*pointer), 0xA5, bytes);  // nobody may rely on zeros
  blocks[*pointer] = {bytes, type};
  taken_bytes += bytes;
  return CUDA_SUCCESS;
}

CUresult Free(uintptr_t pointer) {
  {
    const std::lock_guard<std::mutex> lock(blocks_mutex);
    const auto found = blocks.find(pointer);
    if (found == blocks.end()) return CUDA_ERROR_INVALID_VALUE;
    taken_bytes -= found->second.bytes;
    blocks.erase(found);
  }
  PutInQueue([pointer] { std::free(reinterpret_cast<void*>(pointer)); });  // the driver waits for work that may need it
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// For tests: how many graphs were launched, events created, objects created and copies from the host sent; how much memory is
// taken (also pinned); take all of the GPU's memory.
int standin_replayed() { return num_launches; }
int standin_events() { return num_events; }
int standin_objects() { return num_events + num_other_objects; }
int standin_sent() { return num_sent; }
size_t standin_taken() { return taken_bytes; }
void standin_fill() { taken_bytes = kMemoryBytes; }
int standin_without_pinned = 0, standin_without_graphs = 0, standin_without_kernels = 0;  // 1: out of memory for these
int standin_without_contexts = 0;                                                         // 1: out of memory for another one
int standin_wait_ms = 0;                                                                  // how long waiting for an event takes
int standin_reads_host_pages = 0;    // 1: pageable memory is read when a copy's turn comes, not at once
int standin_old = 0;                 // 1: the driver is older than CUDA 13
int standin_kernels_of_nothing = 0;  // launched so far, in another context
int standin_copies_left = -1;        // copies within the GPU that still work before they fail; below 0: all work

// For tests: how many objects of each kind exist.
const char* standin_alive() {
  static std::string text;
  const std::lock_guard<std::mutex> lock(blocks_mutex);
  const auto count = [](CUmemorytype type) {
    return std::count_if(blocks.begin(), blocks.end(), [type](const auto& each) { return each.second.type == type; });
  };
  text = "memory " + std::to_string(count(CU_MEMORYTYPE_DEVICE)) + ", pinned " + std::to_string(count(CU_MEMORYTYPE_HOST));
  text += ", contexts " + std::to_string(alive.contexts) + ", streams " + std::to_string(alive.streams);
  text += ", events " + std::to_string(alive.events) + ", modules " + std::to_string(alive.modules);
  text += ", graphs " + std::to_string(alive.graphs) + ", launchables " + std::to_string(alive.launchables);
  return text.c_str();
}

// For tests: the nodes of the last graph that was created, one per line: a kernel's name, or "no kernel".
const char* standin_captured() { return last_graph_nodes.c_str(); }

CUresult standin_kernel(CUstream stream, const char* name) {
  return Enqueue(stream, {[] {}, CU_GRAPH_NODE_TYPE_KERNEL, 0, name});
}
bool standin_capturing(CUstream stream) { return stream->capture != nullptr; }
CUmemorytype standin_type_of(const void* pointer) {
  const auto block = BlockOf(reinterpret_cast<uintptr_t>(pointer));
  return block ? block->type : CUmemorytype{};
}

// For tests: enqueue `call` in place of a kernel.
CUresult standin_launch(CUstream stream, CUhostFn call, void* data) {
  return Enqueue(stream, {[=] { call(data); }, CU_GRAPH_NODE_TYPE_KERNEL});
}

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute name, CUdevice) {
  *value = name == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR                       ? 8
           : name == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR                     ? 9
           : name == CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES ? standin_reads_host_pages
                                                                                      : 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int length, CUdevice) { return std::snprintf(name, length, "a stand-in"), CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) { return *bytes = kMemoryBytes, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return *context = reinterpret_cast<CUcontext>(1), CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return context_is_current = true, CUDA_SUCCESS; }
// A second context, for one kernel. When it is destroyed, no context is current on this thread, not the first one either.
CUresult cuCtxCreate(CUcontext* context, CUctxCreateParams*, unsigned, CUdevice) {
  if (standin_without_contexts) return CUDA_ERROR_OUT_OF_MEMORY;
  if (const CUresult failed = Failure()) return failed;
  return ++alive.contexts, context_is_current = true, *context = reinterpret_cast<CUcontext>(2), CUDA_SUCCESS;
}
#undef cuCtxCreate
CUresult cuCtxCreate_v2(CUcontext* context, unsigned flags, CUdevice device) {
  return cuCtxCreate_v4(context, nullptr, flags, device);
}
CUresult cuCtxSynchronize() { return CUDA_SUCCESS; }
CUresult cuCtxDestroy(CUcontext) { return --alive.contexts, context_is_current = false, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "as the driver would put it", CUDA_SUCCESS; }

CUresult cuMemAlloc(CUdeviceptr* pointer, size_t bytes) {
  return Allocate(reinterpret_cast<uintptr_t*>(pointer), bytes, CU_MEMORYTYPE_DEVICE);
}
CUresult cuMemFree(CUdeviceptr pointer) { return Free(pointer); }
CUresult cuMemAllocHost(void** pointer, size_t bytes) {
  if (standin_without_pinned) return CUDA_ERROR_OUT_OF_MEMORY;
  return Allocate(reinterpret_cast<uintptr_t*>(pointer), bytes, CU_MEMORYTYPE_HOST);
}
CUresult cuMemFreeHost(void* pointer) { return Free(reinterpret_cast<uintptr_t>(pointer)); }
CUresult cuMemGetInfo(size_t* free, size_t* total) {
  return *free = kMemoryBytes - taken_bytes, *total = kMemoryBytes, CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr pointer, unsigned char value, size_t bytes, CUstream stream) {
  if (const CUresult failed = Failure()) return failed;
  const Work work = [=] { std::memset(reinterpret_cast<void*>(pointer), value, bytes); };
  return Enqueue(stream, {work, CU_GRAPH_NODE_TYPE_MEMSET});
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute name, CUdeviceptr pointer) {
  if (const CUresult failed = Failure()) return failed;
  const auto block = BlockOf(pointer);
  if (!block || name != CU_POINTER_ATTRIBUTE_MEMORY_TYPE) return CUDA_ERROR_INVALID_VALUE;
  return *static_cast<unsigned*>(value) = block->type, CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  if (const CUresult failed = Failure()) return failed;
  ++num_sent;
  if (BlockOf(reinterpret_cast<uintptr_t>(from))) return Copy(to, reinterpret_cast<uintptr_t>(from), bytes, stream);
  if (stream->capture != nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (standin_reads_host_pages) {
    return Enqueue(stream, {[=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); }, CU_GRAPH_NODE_TYPE_MEMCPY});
  }
  const auto* first = static_cast<const char*>(from);  // pageable memory is read at once
  const std::vector<char> copied(first, first + bytes);
  return Enqueue(stream, {[=] { std::memcpy(reinterpret_cast<void*>(to), copied.data(), bytes); }, CU_GRAPH_NODE_TYPE_MEMCPY});
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (const CUresult failed = Failure()) return failed;
  const CUresult result = Copy(reinterpret_cast<uintptr_t>(to), from, bytes, stream);
  if (!BlockOf(reinterpret_cast<uintptr_t>(to))) WaitFor(NumQueued());  // pageable memory is written before the call returns
  return result;
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (standin_copies_left == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  if (const CUresult failed = Failure()) return failed;
  standin_copies_left -= standin_copies_left > 0 ? 1 : 0;
  return Copy(to, from, bytes, stream);
}

CUresult cuStreamCreate(CUstream* stream, unsigned) {
  if (const CUresult failed = Failure()) return failed;
  return ++num_other_objects, ++alive.streams, *stream = new CUstream_st, CUDA_SUCCESS;
}
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn call, void* data) {
  return Enqueue(stream, {[=] { call(data); }, CU_GRAPH_NODE_TYPE_HOST});
}
CUresult cuEventCreate(CUevent* event, unsigned) {
  if (const CUresult failed = Failure()) return failed;
  return ++num_events, ++alive.events, *event = new CUevent_st, CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent event) { return --alive.events, delete event, CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent event, CUstream stream) {
  if (const CUresult failed = Failure()) return failed;
  if (stream->capture) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  return event->after = NumQueued(), CUDA_SUCCESS;
}
CUresult cuEventSynchronize(CUevent event) {
  std::this_thread::sleep_for(std::chrono::milliseconds(standin_wait_ms));
  return WaitFor(event->after), CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return --alive.graphs, delete graph, CUDA_SUCCESS;
}
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode) {
  if (!context_is_current) return CUDA_ERROR_INVALID_CONTEXT;
  if (const CUresult failed = Failure()) return failed;
  return ++alive.graphs, stream->capture = new CUgraph_st, CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  CUgraph captured = stream->capture;
  *graph = stream->capture = nullptr;  // the capture ends even if this fails, without a graph then
  if (const CUresult failed = Failure()) return cuGraphDestroy(captured), failed;
  return *graph = captured, CUDA_SUCCESS;
}
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  if (const CUresult failed = Failure()) return failed;
  if (nodes == nullptr) return *count = graph->nodes.size(), CUDA_SUCCESS;
  *count = std::min(*count, graph->nodes.size());
  for (size_t index = 0; index < *count; ++index) nodes[index] = &graph->nodes[index];
  return CUDA_SUCCESS;
}
CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  if (const CUresult failed = Failure()) return failed;
  return *type = node->type, CUDA_SUCCESS;
}
CUresult cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D* copy) {
  if (const CUresult failed = Failure()) return failed;
  if (node->type != CU_GRAPH_NODE_TYPE_MEMCPY) return CUDA_ERROR_INVALID_VALUE;
  *copy = {};
  copy->srcMemoryType = CU_MEMORYTYPE_DEVICE;  // also for pinned memory, as unified addressing allows: the harder case
  copy->dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy->srcDevice = node->source;
  return CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long) {
  if (standin_without_graphs) return CUDA_ERROR_OUT_OF_MEMORY;
  if (const CUresult failed = Failure()) return failed;
  ++alive.launchables;
  taken_bytes += graph->nodes.size();
  last_graph_nodes.clear();
  for (const CUgraphNode_st& node : graph->nodes)
    last_graph_nodes += (node.type == CU_GRAPH_NODE_TYPE_KERNEL ? node.name : "no kernel") + "\n";
  return *executable = new CUgraphExec_st{graph->nodes}, CUDA_SUCCESS;
}
CUresult cuGraphExecDestroy(CUgraphExec executable) {
  --alive.launchables;
  taken_bytes -= executable->nodes.size();
  return delete executable, CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  if (const CUresult failed = Failure()) return failed;
  ++num_launches;
  for (const CUgraphNode_st& node : executable->nodes)
    if (const CUresult code = Enqueue(stream, node)) return code;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const auto* text = static_cast<const char*>(image);
  if (const CUresult failed = Failure()) return failed;
  if (std::strstr(text, ".visible .entry nothing(") != nullptr) return *module = kNothing, CUDA_SUCCESS;
  if (std::strstr(text, ".visible .entry skd_turnaround_kernel(") == nullptr) return CUDA_ERROR_INVALID_PTX;
  if (standin_old) return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
  return ++num_other_objects, ++alive.modules, *module = reinterpret_cast<CUmodule>(1), CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  if (const CUresult failed = Failure()) return failed;
  if (module == kNothing) return *function = reinterpret_cast<CUfunction>(kNothing), CUDA_SUCCESS;
  if (std::strcmp(name, "skd_turnaround_kernel") != 0) return CUDA_ERROR_NOT_FOUND;
  return *function = reinterpret_cast<CUfunction>(1), CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction kernel, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                        CUstream stream, void** parameters, void**) {
  if (const CUresult failed = Failure()) return failed;
  if (kernel == reinterpret_cast<CUfunction>(kNothing)) return ++standin_kernels_of_nothing, CUDA_SUCCESS;
  if (standin_without_kernels) return CUDA_ERROR_OUT_OF_MEMORY;
  const SkdTurnaround state = *static_cast<const SkdTurnaround*>(parameters[0]);  // copied now, as the driver does
  if (x != static_cast<unsigned>(state.rows) || threads != SKD_TURNAROUND_THREADS) return CUDA_ERROR_INVALID_VALUE;
  using Pointers = std::initializer_list<const void*>;
  for (const void* pointer : Pointers{state.logits, state.sampling, state.row_ids, state.steps, state.input_ids})
    if (!HasMemoryType(pointer, CU_MEMORYTYPE_DEVICE)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (!HasMemoryType(state.tokens, CU_MEMORYTYPE_HOST)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return Enqueue(stream, {[state] { skd_turnaround_host(&state); }, CU_GRAPH_NODE_TYPE_KERNEL, 0, "skd_turnaround_kernel"});
}
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_ERROR_NOT_SUPPORTED;  // defined because ONNX Runtime's provider is linked to it
}

// cuda-python looks up every driver function by name. Those that are not here are reported as not found.
CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
  static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *function = nullptr;
  for (const char* suffix : {"", "_v2", "_v3", "_v4"}) {
    if (*function == nullptr) *function = dlsym(self, (std::string(name) + suffix).c_str());
  }
  if (found != nullptr) *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
}
