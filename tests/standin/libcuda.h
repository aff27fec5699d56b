// What the stand-in for CUDA's runtime asks of the stand-in for its driver, in addition to the driver's own functions.
#pragma once

#include <cuda.h>

extern "C" {
// Enqueue a kernel that computes nothing.
CUresult standin_kernel(CUstream stream, const char* name);
bool standin_capturing(CUstream stream);
// CU_MEMORYTYPE_HOST for pinned memory, 0 for memory that the driver does not know.
CUmemorytype standin_type_of(const void* pointer);
}
