#include "cuda_stream.h"

#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "error.h"

namespace skd::cuda_stream {
namespace {

using cuda_driver::Address;
using cuda_driver::Check;
using cuda_driver::Driver;
using cuda_driver::Node;
using cuda_driver::Result;

constexpr unsigned kNonBlocking = 1;     // CU_STREAM_NON_BLOCKING: this stream and the default stream do not wait for each other
constexpr unsigned kDisableTiming = 2;   // CU_EVENT_DISABLE_TIMING
constexpr int kRelaxedCapture = 2;       // CU_STREAM_CAPTURE_MODE_RELAXED: engines may allocate while they are recorded
constexpr int kMemoryTypeAttribute = 2;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr char kEmptyKernelPtx[] = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry nothing() { ret; }\n";

struct Shared {
  cuda_driver::Stream* stream = nullptr;
  cuda_driver::Event* event = nullptr;  // recorded by WaitForAll
  std::mutex mutex;                     // held while work is put on the stream
  bool ran_in_other_context = false;
};

// Never destroyed, because other static objects may free their blocks after it would have been.
Shared& TheStream() {
  static auto* const shared = new Shared();
  static const bool made = [] {  // if this throws, the next call tries again, keeping what has been created
    const Driver& driver = cuda_driver::Ready();
    if (shared->stream == nullptr) Check(driver, driver.create_stream(&shared->stream, kNonBlocking));
    Check(driver, driver.create_event(&shared->event, kDisableTiming));
    return true;
  }();
  static_cast<void>(made);
  return *shared;
}

// One thread's turn: the driver is ready on this thread, and only this thread may put work on the stream.
struct Turn {
  Shared& shared = TheStream();
  std::lock_guard<std::mutex> lock{shared.mutex};
  const Driver& driver = cuda_driver::Ready();
};

// Runs `work` and ignores what it throws, for destructors. If the driver is gone, so are its memory and graphs.
template <typename Work>
void IgnoringErrors(Work work) noexcept {
  try {
    work(Turn());
  } catch (...) {  // NOLINT(bugprone-empty-catch)
  }
}

// Memory is freed even if this fails, or it would stay behind: the driver waits, too, though NVIDIA does not promise that.
void WaitBeforeFreeing(const Turn& turn) {
  if (turn.driver.record(turn.shared.event, turn.shared.stream) == 0) turn.driver.wait(turn.shared.event);
}

Address AddressOf(const std::byte* memory) { return reinterpret_cast<Address>(memory); }

bool ReadsHostMemory(const Driver& driver, const cuda_driver::Copy3D& copy) {
  if (copy.source_type == cuda_driver::kHostMemory) return true;
  // ask for the address's type too: under unified addressing a copy may declare pinned host memory as the device's
  unsigned type = 0;
  Check(driver, driver.attribute(&type, kMemoryTypeAttribute, copy.source_device));
  return type != cuda_driver::kDeviceMemory;
}

void CheckRepeatable(const Driver& driver, cuda_driver::Graph* graph) {
  size_t count = 0;
  Check(driver, driver.nodes(graph, nullptr, &count));
  std::vector<Node*> nodes(count);
  if (count == 0) throw TargetError("a graph is empty", "decode without graphs");
  Check(driver, driver.nodes(graph, nodes.data(), &count));
  for (Node* node : nodes) {
    int type = 0;
    Check(driver, driver.node_type(node, &type));
    cuda_driver::Copy3D copy{};
    if (type == cuda_driver::kCopyNode) Check(driver, driver.copy_of(node, &copy));
    if (type == cuda_driver::kHostNode || (type == cuda_driver::kCopyNode && ReadsHostMemory(driver, copy))) {
      throw TargetError("a graph calls the host or reads its memory", "decode without graphs");
    }
  }
}

// Runs a kernel in another context of this process, once, after the engines' kernels have run. From then on the GPU takes
// less time between two kernels (runtime/cuda.py). If there is no memory for the context, steps take as long as before.
void RunKernelInOtherContext(const Turn& turn) {
  turn.shared.ran_in_other_context = true;
  const Driver& driver = turn.driver;
  void* context = nullptr;
  if (driver.create_context(&context, 0, driver.device) != 0) return;
  cuda_driver::Module* module = nullptr;
  cuda_driver::Kernel* kernel = nullptr;
  if (driver.load(&module, kEmptyKernelPtx) == 0 && driver.kernel_of(&kernel, module, "nothing") == 0 &&
      driver.launch_kernel(kernel, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr) == 0) {
    driver.wait_for_context();
  }
  driver.destroy_context(context);
  Check(driver, driver.use(driver.context));
}

// Returns the graph of what `calls` put on the stream. Recording ends even if `calls` throw.
cuda_driver::Graph* RecordGraph(const Turn& turn, const Calls& calls) {
  const auto& [shared, lock, driver] = turn;
  Check(driver, driver.begin_capture(shared.stream, kRelaxedCapture));
  cuda_driver::Graph* graph = nullptr;
  try {
    calls();
  } catch (...) {
    driver.end_capture(shared.stream, &graph);  // its error, about the broken capture, would hide the cause
    if (graph != nullptr) driver.destroy_graph(graph);
    throw;
  }
  Check(driver, driver.end_capture(shared.stream, &graph));
  return graph;
}

}  // namespace

std::byte* Allocate(size_t bytes) {
  const Turn turn;
  Address memory = 0;
  try {
    Check(turn.driver, turn.driver.allocate(&memory, bytes));
  } catch (const Error& error) {
    if (error.code() != SKD_ERROR_CAPACITY) throw;
    throw CapacityError("the GPU has no room for a buffer of " + std::to_string(bytes >> 20) + " MiB",
                        "ask for fewer rows, shorter prompts or fewer new tokens");
  }
  if (const Result failed = turn.driver.set(memory, 0, bytes, turn.shared.stream); failed != 0) {
    turn.driver.free(memory);  // its error would hide the cause
    Check(turn.driver, failed);
  }
  return reinterpret_cast<std::byte*>(memory);  // NOLINT(performance-no-int-to-ptr): the driver's addresses are integers
}

void Free(std::byte* memory) noexcept {
  IgnoringErrors([memory](const Turn& turn) {
    WaitBeforeFreeing(turn);
    turn.driver.free(AddressOf(memory));
  });
}

std::byte* AllocateHost(size_t bytes) {
  const Turn turn;
  void* memory = nullptr;
  Check(turn.driver, turn.driver.allocate_host(&memory, bytes));
  return static_cast<std::byte*>(std::memset(memory, 0, bytes));
}

void FreeHost(std::byte* memory) noexcept {
  IgnoringErrors([memory](const Turn& turn) {
    WaitBeforeFreeing(turn);
    turn.driver.free_host(memory);
  });
}

void Send(std::byte* to, const void* from, size_t bytes) {
  const Turn turn;
  Check(turn.driver, turn.driver.send(AddressOf(to), from, bytes, turn.shared.stream));
}

void Receive(void* to, const std::byte* from, size_t bytes) {
  {
    const Turn turn;
    Check(turn.driver, turn.driver.receive(to, AddressOf(from), bytes, turn.shared.stream));
  }
  WaitForAll();
}

void WaitForAll() {
  {
    const Turn turn;
    Check(turn.driver, turn.driver.record(turn.shared.event, turn.shared.stream));
  }
  // outside the turn, so that other threads can put work on the stream meanwhile
  const Driver& driver = cuda_driver::Ready();
  Check(driver, driver.wait(TheStream().event));
}

void Copy(std::byte* to, const std::byte* from, size_t bytes) {
  const Turn turn;
  Check(turn.driver, turn.driver.copy(AddressOf(to), AddressOf(from), bytes, turn.shared.stream));
}

void Clear(std::byte* memory, size_t bytes) {
  const Turn turn;
  Check(turn.driver, turn.driver.set(AddressOf(memory), 0, bytes, turn.shared.stream));
}

void* Handle() { return TheStream().stream; }

void Run(const Calls& calls) {
  const Turn turn;
  calls();
}

cuda_driver::Module* LoadModule(const char* ptx) {
  const Turn turn;
  cuda_driver::Module* module = nullptr;
  Check(turn.driver, turn.driver.load(&module, ptx));
  return module;
}

cuda_driver::Kernel* KernelOf(cuda_driver::Module* module, const char* name) {
  const Turn turn;
  cuda_driver::Kernel* kernel = nullptr;
  Check(turn.driver, turn.driver.kernel_of(&kernel, module, name));
  return kernel;
}

void Launch(cuda_driver::Kernel* kernel, unsigned blocks, unsigned threads, void* argument) {
  const Turn turn;
  Check(turn.driver, turn.driver.launch_kernel(kernel, blocks, 1, 1, threads, 1, 1, 0, turn.shared.stream, &argument, nullptr));
}

Event::Event() {
  const Turn turn;
  Check(turn.driver, turn.driver.create_event(&event_, kDisableTiming));
}

Event::~Event() {
  IgnoringErrors([this](const Turn& turn) { turn.driver.destroy_event(event_); });
}

void Event::Record() {
  const Turn turn;
  Check(turn.driver, turn.driver.record(event_, turn.shared.stream));
}

void Event::Wait() const {
  const Driver& driver = cuda_driver::Ready();
  Check(driver, driver.wait(event_));
}

Graph::Graph(const Calls& calls) {
  const Turn turn;
  const Driver& driver = turn.driver;
  if (!turn.shared.ran_in_other_context) RunKernelInOtherContext(turn);
  cuda_driver::Graph* graph = RecordGraph(turn, calls);
  try {
    CheckRepeatable(driver, graph);
    Check(driver, driver.instantiate(&launchable_, graph, 0));
  } catch (...) {
    driver.destroy_graph(graph);
    throw;
  }
  driver.destroy_graph(graph);
}

Graph::~Graph() {
  // the driver defers this until a launch in progress is done
  IgnoringErrors([this](const Turn& turn) { turn.driver.destroy_launchable(launchable_); });
}

void Graph::Launch() const {
  const Turn turn;
  Check(turn.driver, turn.driver.launch(launchable_, turn.shared.stream));
}

}  // namespace skd::cuda_stream
