// Memory that engines work in.
#include <cstring>
#include <fstream>
#include <string>

#include "catch.h"
#include "memory.h"

namespace {

constexpr size_t kMiB = size_t{1} << 20;

size_t HugePageBytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string word; rollup >> word;) {
    size_t kib = 0;
    if (word == "AnonHugePages:" && rollup >> kib) return kib << 10;
  }
  return 0;
}

bool SystemHasHugePages() {
  std::string enabled;
  std::getline(std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"), enabled);
  return !enabled.empty() && enabled.find("[never]") == std::string::npos;
}

}  // namespace

TEST_CASE("a large block such as a KV buffer lies in huge pages from its first touch") {
  if (!SystemHasHugePages()) {
    WARN("this system has no transparent huge pages, or they are switched off");
    return;
  }
  const size_t huge = HugePageBytes();
  const skd::Block block = skd::Memory(skd::Device::kCpu, "float32").Allocate(32 * kMiB);
  std::memset(block.get(), 7, 32 * kMiB);
  CHECK(HugePageBytes() >= huge + 16 * kMiB);
}
