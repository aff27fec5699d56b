// Symbols of the stand-in for NVIDIA's driver (tests/standin/libcuda.cc), by name.
#pragma once

#include <dlfcn.h>

#include <stdexcept>

// A function, or a number that tests set: Driver<int>("standin_old").
template <typename Symbol>
Symbol* Driver(const char* name) {
  void* found = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
  if (found == nullptr) throw std::runtime_error(name);
  return reinterpret_cast<Symbol*>(found);
}
