// NVIDIA's driver: the functions that this library calls, looked up when the first of them is needed. ONNX Runtime's C API
// cannot record a caller's graph, and copies between devices only since version 23, while the packaged headers are at 21. The
// driver is present wherever ONNX Runtime's CUDA provider runs. The GPU is the first one.
#pragma once

#include <cstddef>

namespace skd::cuda_driver {

// as in cuda.h
using Result = int;
using Address = unsigned long long;  // NOLINT(google-runtime-int)
struct Stream;
struct Event;
struct Graph;
struct Node;
struct Launchable;  // CUgraphExec
struct Module;
struct Kernel;  // CUfunction

// CUDA_MEMCPY3D, which describes a copy in a graph. Only the source is read here.
struct Copy3D {
  size_t source_x, source_y, source_z, source_lod;
  unsigned source_type;  // CUmemorytype
  const void* source_host;
  Address source_device;
  void* rest[18];
};

constexpr unsigned kHostMemory = 1, kDeviceMemory = 2;  // CUmemorytype
constexpr int kCopyNode = 1, kHostNode = 3;             // CUgraphNodeType

struct Driver {
  Result (*use)(void* context);
  Result (*create_context)(void** context, unsigned flags, int device);  // and makes it this thread's current one
  Result (*destroy_context)(void* context);
  Result (*wait_for_context)();
  Result (*describe)(Result error, const char** text);
  Result (*allocate)(Address* memory, size_t bytes);
  Result (*free)(Address memory);
  Result (*allocate_host)(void** memory, size_t bytes);
  Result (*free_host)(void* memory);
  Result (*set)(Address memory, unsigned char value, size_t bytes, Stream* stream);
  Result (*send)(Address to, const void* from, size_t bytes, Stream* stream);
  Result (*receive)(void* to, Address from, size_t bytes, Stream* stream);
  Result (*copy)(Address to, Address from, size_t bytes, Stream* stream);
  Result (*create_stream)(Stream** stream, unsigned flags);
  Result (*create_event)(Event** event, unsigned flags);
  Result (*destroy_event)(Event* event);
  Result (*record)(Event* event, Stream* stream);
  Result (*wait)(Event* event);
  Result (*begin_capture)(Stream* stream, int mode);
  Result (*end_capture)(Stream* stream, Graph** graph);
  Result (*nodes)(Graph* graph, Node** nodes, size_t* count);
  Result (*node_type)(Node* node, int* type);
  Result (*copy_of)(Node* node, Copy3D* copy);
  Result (*attribute)(void* value, int name, Address pointer);
  Result (*instantiate)(Launchable** launchable, Graph* graph, unsigned long long flags);  // NOLINT(google-runtime-int)
  Result (*launch)(Launchable* launchable, Stream* stream);
  Result (*destroy_graph)(Graph* graph);
  Result (*destroy_launchable)(Launchable* launchable);
  Result (*load)(Module** module, const void* image);
  Result (*kernel_of)(Kernel** kernel, Module* module, const char* name);
  Result (*launch_kernel)(Kernel* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                          unsigned block_z, unsigned shared_bytes, Stream* stream, void** arguments, void** more);
  int device;
  void* context;  // the device's primary context, which ONNX Runtime uses too
};

// The driver, its context current on this thread. Throws SKD_ERROR_TARGET if there is no driver or no GPU.
const Driver& Ready();

// Throws unless `result` is 0: SKD_ERROR_CAPACITY if CUDA is out of memory, otherwise SKD_ERROR_TARGET.
void Check(const Driver& driver, Result result);

}  // namespace skd::cuda_driver
