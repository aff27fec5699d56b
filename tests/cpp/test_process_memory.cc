// The process's memory around loading engines.
#include <sys/mman.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "memory.h"
#include "process_memory.h"

namespace {

constexpr size_t kMiB = size_t{1} << 20;

// Anonymous memory, in use from the start or untouched.
class Mapping {
 public:
  Mapping(size_t bytes, bool in_use) : bytes_(bytes) {
    address_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(address_ != MAP_FAILED);
    if (in_use) std::memset(address_, 7, bytes);
  }
  ~Mapping() { munmap(address_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  uintptr_t start() const { return reinterpret_cast<uintptr_t>(address_); }
  bool Holds(uint8_t value) const {
    const auto* bytes = static_cast<const uint8_t*>(address_);
    for (size_t i = 0; i < bytes_; ++i) {
      if (bytes[i] != value) return false;
    }
    return true;
  }
  // Bytes of this mapping that are in `regions`.
  size_t Shared(const std::vector<skd::Region>& regions) const {
    size_t shared = 0;
    for (const skd::Region& region : regions) {
      const uintptr_t first = std::max(region.start, start()), last = std::min(region.end, start() + bytes_);
      if (first < last) shared += last - first;
    }
    return shared;
  }

 private:
  void* address_;
  size_t bytes_;
};

size_t HugeBytes() {
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

TEST_CASE("new memory in use goes into huge pages with its content") {
  if (!SystemHasHugePages()) {
    WARN("this system has no transparent huge pages, or they are switched off");
    return;
  }
  const std::vector<skd::Region> before = skd::AnonymousRegions();
  const Mapping memory(16 * kMiB, true);
  const std::vector<skd::Region> blocks = skd::FullBlocks(before);
  REQUIRE(memory.Shared(blocks) >= 12 * kMiB);
  const size_t huge = HugeBytes();
  const skd::HugePages moving(blocks);
  for (int wait = 0; wait < 200 && HugeBytes() < huge + 12 * kMiB; ++wait)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(HugeBytes() >= huge + 12 * kMiB);
  CHECK(memory.Holds(7));
}

TEST_CASE("memory that nobody uses, and memory of before, stay as they are") {
  const Mapping older(8 * kMiB, true);
  const std::vector<skd::Region> before = skd::AnonymousRegions();
  const Mapping unused(64 * kMiB, false);
  const std::vector<skd::Region> blocks = skd::FullBlocks(before);
  CHECK(older.Shared(blocks) == 0);
  CHECK(unused.Shared(blocks) == 0);
}

TEST_CASE("a large block, as a KV buffer is, lies in huge pages from its first touch") {
  if (!SystemHasHugePages()) {
    WARN("this system has no transparent huge pages, or they are switched off");
    return;
  }
  const size_t huge = HugeBytes();
  const skd::Block block = skd::Memory(skd::Device::kCpu, "float32").Allocate(32 * kMiB);
  std::memset(block.get(), 7, 32 * kMiB);
  CHECK(HugeBytes() >= huge + 16 * kMiB);
}

TEST_CASE("huge pages can be given up at once") {
  const std::vector<skd::Region> before = skd::AnonymousRegions();
  const Mapping memory(64 * kMiB, true);
  { const skd::HugePages moving(skd::FullBlocks(before)); }
  CHECK(memory.Holds(7));
}
