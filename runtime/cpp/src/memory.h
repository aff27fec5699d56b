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
  ONNXTensorElementDataType floats() const { return floats_; }
  size_t float_size() const { return SizeOf(floats_); }
  // Throws SKD_ERROR_CAPACITY, std::bad_alloc.
  Block Allocate(size_t bytes) const;
  // On the host, where the GPU reads and writes it by itself.
  Block AllocateHost(size_t bytes) const;
  // Everything happens in the order in which it is asked for; on a GPU only Receive and WaitForAll wait for its end. What is
  // sent must stay as it is until then.
  void Send(std::byte* to, const void* from, size_t bytes) const;
  void Receive(void* to, const std::byte* from, size_t bytes) const;
  void Copy(std::byte* to, const std::byte* from, size_t bytes) const;
  void Clear(std::byte* memory, size_t bytes) const;
  void WaitForAll() const;

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
  Twin(const Memory& memory, int64_t count)
      : memory_(memory), host_(memory.AllocateHost(sizeof(T) * static_cast<size_t>(count))), copy_(nullptr, nullptr) {
    if (!memory.in_place()) copy_ = memory.Allocate(sizeof(T) * static_cast<size_t>(count));
  }
  T& operator[](int64_t index) { return data()[index]; }
  T* data() { return reinterpret_cast<T*>(host_.get()); }
  const T* data() const { return reinterpret_cast<const T*>(host_.get()); }
  // Element `index`, as engines see it.
  std::byte* seen(int64_t index = 0) { return (copy_ ? copy_.get() : host_.get()) + index * static_cast<int64_t>(sizeof(T)); }
  // Let engines see `count` elements, from `first` on, as the host has them.
  void Send(int64_t count, int64_t first = 0) {
    if (copy_) memory_.Send(seen(first), data() + first, sizeof(T) * static_cast<size_t>(count));
  }
  // Let the host see `count` elements, from `first` on, as engines have them.
  void Receive(int64_t first, int64_t count) {
    if (copy_) memory_.Receive(data() + first, seen(first), sizeof(T) * static_cast<size_t>(count));
  }

 private:
  const Memory& memory_;
  Block host_, copy_;
};

}  // namespace skd
