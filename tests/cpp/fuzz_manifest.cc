// libFuzzer's target: any text must either parse or throw skd::Error.
#include <cstddef>
#include <cstdint>
#include <string>

#include "error.h"
#include "manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    skd::ParseManifest(std::string(reinterpret_cast<const char*>(data), size));
  } catch (const skd::Error&) {
  }
  return 0;
}
