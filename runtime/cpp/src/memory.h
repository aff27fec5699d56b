// Where engines' arrays live: on the host, or on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"

namespace skd {

// Bytes of a Memory, zeroed when they were handed out; empty for none.
using Block = std::unique_ptr<std::byte, void (*)(std::byte*)>;

class Memory {
 public:
  // `floats`: of hidden states, keys and values; a bundle's word: float32, float16, bfloat16.
  Memory(Device device, const std::string& floats);

  bool on_host() const { return device_ == Device::kCpu; }
  // Whether engines read what the host writes as it is: those for CPUs, in float32. Others have copies, on a CPU too.
  bool in_place() const { return on_host() && floats_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  size_t float_size() const { return SizeOf(floats_); }
  // Throws SKD_ERROR_CAPACITY, std::bad_alloc.
  Block Allocate(size_t bytes) const;
  void Send(std::byte* to, const void* from, size_t bytes) const;
  void Receive(void* to, const std::byte* from, size_t bytes) const;
  void Copy(std::byte* to, const std::byte* from, size_t bytes) const;

  // Tensors of this memory.
  Tensor Floats(std::string name, std::byte* data, std::vector<int64_t> shape) const;
  Tensor Of(std::string name, std::byte* data, std::vector<int64_t> shape, ONNXTensorElementDataType type) const;

 private:
  Device device_;
  ONNXTensorElementDataType floats_;
};

// An array on the host, and what engines see of it: the same bytes, or a copy in their memory, which must outlive this.
template <typename T>
class Twin {
 public:
  Twin(const Memory& memory, int64_t count) : memory_(memory), host_(static_cast<size_t>(count)), copy_(nullptr, nullptr) {
    if (!memory.in_place()) copy_ = memory.Allocate(sizeof(T) * host_.size());
  }
  T& operator[](int64_t index) { return host_[static_cast<size_t>(index)]; }
  T* data() { return host_.data(); }
  const T* data() const { return host_.data(); }
  // Element `index`, as engines see it.
  std::byte* seen(int64_t index = 0) {
    return (copy_ ? copy_.get() : reinterpret_cast<std::byte*>(host_.data())) + index * static_cast<int64_t>(sizeof(T));
  }
  // Let engines see the first `count` elements as the host has them.
  void Send(int64_t count) {
    if (copy_) memory_.Send(copy_.get(), host_.data(), sizeof(T) * static_cast<size_t>(count));
  }
  // Let the host see `count` elements, from `first` on, as engines have them.
  void Receive(int64_t first, int64_t count) {
    if (copy_) memory_.Receive(host_.data() + first, seen(first), sizeof(T) * static_cast<size_t>(count));
  }

 private:
  const Memory& memory_;
  std::vector<T> host_;
  Block copy_;
};

}  // namespace skd
