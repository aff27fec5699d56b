// NVIDIA's driver: the few calls that keep arrays on a GPU. ONNX Runtime's C API has a copy between devices only since version
// 23, the packaged headers are 21; the driver is wherever its CUDA provider runs. The GPU is the first one.
#pragma once

#include <cstddef>

namespace skd::cuda_driver {

// All throw SKD_ERROR_TARGET where there is no driver or no GPU, or where it fails; they return when the work is done.

// Zeros. Throws SKD_ERROR_CAPACITY where the GPU has not this much memory.
std::byte* Allocate(size_t bytes);
void Free(std::byte* memory) noexcept;
void Send(std::byte* to, const void* from, size_t bytes);
void Receive(void* to, const std::byte* from, size_t bytes);
void Copy(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace skd::cuda_driver
