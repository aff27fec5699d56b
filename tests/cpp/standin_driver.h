// Symbols of the stand-in for NVIDIA's driver (tests/standin/libcuda.cc), by name.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

// A function, or a number that tests set: Driver<int>("standin_old").
template <typename Symbol>
Symbol* Driver(const char* name) {
  void* found = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
  if (found == nullptr) throw std::runtime_error(name);
  return reinterpret_cast<Symbol*>(found);
}

// What exists on the GPU: "memory 3, pinned 2, contexts 0, ..".
inline std::string Alive() { return Driver<const char*()>("standin_alive")(); }
