#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "cuda_stream.h"

namespace skd {
namespace {

ONNXTensorElementDataType TypeOf(const std::string& floats) {
  if (floats == "float16") return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
  if (floats == "bfloat16") return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
  return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}

constexpr size_t kHugePagesFromBytes = size_t{4} << 20;  // as in numpy; below it little is gained

// Advice only. A step reads the whole KV buffer, which in pages of 4 KiB means a walk through the page table every 4 KiB.
void AskForHugePages(std::byte* memory, size_t bytes) {
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = reinterpret_cast<uintptr_t>(memory) + bytes;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // NOLINT(performance-no-int-to-ptr)
}

void FreeOnHost(std::byte* memory) { std::free(memory); }  // NOLINT(cppcoreguidelines-no-malloc)

}  // namespace

Memory::Memory(Device device, const std::string& floats) : device_(device), floats_(TypeOf(floats)) {}

Block Memory::Allocate(size_t bytes) const {
  if (bytes == 0) return {nullptr, FreeOnHost};
  if (!on_host()) return {cuda_stream::Allocate(bytes), [](std::byte* memory) { cuda_stream::Free(memory); }};
  // zeroed by the system page by page, when a page is first touched
  auto* memory = static_cast<std::byte*>(std::calloc(bytes, 1));  // NOLINT(cppcoreguidelines-no-malloc)
  if (memory == nullptr) throw std::bad_alloc();
  if (bytes >= kHugePagesFromBytes) AskForHugePages(memory, bytes);
  return {memory, FreeOnHost};
}

Block Memory::AllocateHost(size_t bytes) const {
  if (on_host() || bytes == 0) return Allocate(bytes);
  return {cuda_stream::AllocateHost(bytes), [](std::byte* memory) { cuda_stream::FreeHost(memory); }};
}

void Memory::Send(std::byte* to, const void* from, size_t bytes) const {
  if (on_host()) {
    std::memcpy(to, from, bytes);
  } else {
    cuda_stream::Send(to, from, bytes);
  }
}

void Memory::Receive(void* to, const std::byte* from, size_t bytes) const {
  if (on_host()) {
    std::memcpy(to, from, bytes);
  } else {
    cuda_stream::Receive(to, from, bytes);
  }
}

void Memory::Copy(std::byte* to, const std::byte* from, size_t bytes) const {
  if (on_host()) {
    std::memcpy(to, from, bytes);
  } else {
    cuda_stream::Copy(to, from, bytes);
  }
}

void Memory::Clear(std::byte* memory, size_t bytes) const {
  if (on_host()) {
    std::memset(memory, 0, bytes);
  } else {
    cuda_stream::Clear(memory, bytes);
  }
}

void Memory::WaitForAll() const {
  if (!on_host()) cuda_stream::WaitForAll();
}

Tensor Memory::Floats(std::string name, std::byte* data, std::vector<int64_t> shape) const {
  return TensorAt(std::move(name), data, std::move(shape), floats_);
}

Tensor Memory::TensorAt(std::string name, std::byte* data, std::vector<int64_t> shape, ONNXTensorElementDataType type) const {
  return {std::move(name), data, std::move(shape), type, device_};
}

}  // namespace skd
