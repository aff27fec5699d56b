// What the stand-in for CUDA's runtime asks of the one for its driver, beside what the driver itself offers.
#pragma once

#include <cuda.h>

extern "C" {
// A kernel that computes nothing, on `stream`.
CUresult standin_kernel(CUstream stream, const char* name);
bool standin_capturing(CUstream stream);
// CU_MEMORYTYPE_HOST: pinned; 0: memory that the driver does not know.
CUmemorytype standin_type_of(const void* pointer);
}
