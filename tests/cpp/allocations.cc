#include "allocations.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

thread_local int allocations_left = -1;  // below 0: all succeed

bool IsOfSkipdecode(void* caller) {
  Dl_info found{};
  return dladdr(caller, &found) != 0 && std::strstr(found.dli_fname, "libskipdecode") != nullptr;
}

}  // namespace

void FailAllocationAfter(int allocations) { allocations_left = allocations; }

int AllocationsLeft() { return allocations_left; }

void StopFailingAllocations() { allocations_left = -1; }

void* operator new(std::size_t size) {
  if (allocations_left >= 0 && IsOfSkipdecode(__builtin_return_address(0)) && allocations_left-- == 0) throw std::bad_alloc();
  void* memory = std::malloc(std::max<std::size_t>(size, 1));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// replaced too, because the address sanitizer's version would not match these deletes
void* operator new(std::size_t size, const std::nothrow_t& /*tag*/) noexcept {
  return std::malloc(std::max<std::size_t>(size, 1));
}

void operator delete(void* memory) noexcept { std::free(memory); }

void operator delete(void* memory, std::size_t /*size*/) noexcept { std::free(memory); }
