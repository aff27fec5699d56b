// Where engines' arrays live: on the host, or on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"

namespace skd {

// Bytes allocated by a Memory, initially zero; empty for 0 bytes.
using Block = std::unique_ptr<std::byte, void (*)(std::byte*)>;

class Memory {
 public:
  // `floats`: the type of hidden states, keys and values, as bundle.json has it: float32, float16 or bfloat16.
  Memory(Device device, const std::string& floats);

  bool on_host() const { return device_ == Device::kCpu; }
  // Whether engines read the host's arrays directly, as the cpu target's do, in float32. Others read copies, even on a CPU.
  bool in_place() const { return on_host() && floats_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  ONNXTensorElementDataType floats() const { return floats_; }
  size_t float_size() const { return SizeOf(floats_); }
  // Throws SKD_ERROR_CAPACITY, std::bad_alloc.
  Block Allocate(size_t bytes) const;
  // On the host, in memory that the GPU reads and writes directly.
  Block AllocateHost(size_t bytes) const;
  // These take effect in the order of the calls. On a GPU only Receive and WaitForAll wait for that; until then what is sent
  // must not change.
  void Send(std::byte* to, const void* from, size_t bytes) const;
  void Receive(void* to, const std::byte* from, size_t bytes) const;
  void Copy(std::byte* to, const std::byte* from, size_t bytes) const;
  void Clear(std::byte* memory, size_t bytes) const;
  void WaitForAll() const;

  // Describe an array in this memory.
  Tensor Floats(std::string name, std::byte* data, std::vector<int64_t> shape) const;
  Tensor TensorAt(std::string name, std::byte* data, std::vector<int64_t> shape, ONNXTensorElementDataType type) const;

 private:
  Device device_;
  ONNXTensorElementDataType floats_;
};

// An array on the host and the array that engines see: the same bytes, or a copy in `memory`, which must outlive this.
template <typename T>
class MirroredArray {
 public:
  MirroredArray(const Memory& memory, int64_t count)
      : memory_(memory), host_(memory.AllocateHost(sizeof(T) * static_cast<size_t>(count))), copy_(nullptr, nullptr) {
    if (!memory.in_place()) copy_ = memory.Allocate(sizeof(T) * static_cast<size_t>(count));
  }
  T& operator[](int64_t index) { return data()[index]; }
  T* data() { return reinterpret_cast<T*>(host_.get()); }
  const T* data() const { return reinterpret_cast<const T*>(host_.get()); }
  // The address of element `index` for engines.
  std::byte* engine_address(int64_t index = 0) {
    return (copy_ ? copy_.get() : host_.get()) + index * static_cast<int64_t>(sizeof(T));
  }
  // Copy `count` elements, from `first` on, to where engines see them.
  void Send(int64_t count, int64_t first = 0) {
    if (copy_) memory_.Send(engine_address(first), data() + first, sizeof(T) * static_cast<size_t>(count));
  }
  // Copy `count` elements, from `first` on, back from there.
  void Receive(int64_t first, int64_t count) {
    if (copy_) memory_.Receive(data() + first, engine_address(first), sizeof(T) * static_cast<size_t>(count));
  }

 private:
  const Memory& memory_;
  Block host_, copy_;
};

}  // namespace skd
