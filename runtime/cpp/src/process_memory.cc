#include "process_memory.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <utility>

namespace skd {
namespace {

constexpr uintptr_t kPage = uintptr_t{4} << 10;  // where pages have other sizes, memory is left as it is
constexpr uintptr_t kHuge = uintptr_t{2} << 20;
constexpr uintptr_t kStride = 32 * kHuge;  // between two looks at whether to stop
// of a huge page's pages, or it would take memory that nobody has asked for (stacks, a heap's reserve)
constexpr double kResident = 0.9;
constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, newer than many headers

void* Address(uintptr_t address) { return reinterpret_cast<void*>(address); }  // NOLINT(performance-no-int-to-ptr)

// Mappings of this process whose rights (rwxp) and path are `wanted`, in order.
std::vector<Region> Regions(const std::function<bool(const std::string& rights, const std::string& path)>& wanted) {
  std::vector<Region> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    Region region{};
    char dash = 0;
    std::string rights, offset, device, inode, path;
    words >> std::hex >> region.start >> dash >> region.end >> rights >> offset >> device >> inode >> std::ws;
    std::getline(words, path);
    if (wanted(rights, path)) found.push_back(region);
  }
  return found;
}

// Whether there are huge pages of the size known here, and the administrator has not switched them off.
bool Allowed() {
  std::string enabled;
  uintptr_t size = 0;
  std::getline(std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"), enabled);
  std::ifstream("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") >> size;
  return !enabled.empty() && enabled.find("[never]") == std::string::npos && size == kHuge;
}

// The parts of `region` that are in none of `others`, which are in order.
std::vector<Region> Without(Region region, const std::vector<Region>& others) {
  std::vector<Region> parts;
  for (const Region& other : others) {
    if (other.end <= region.start || other.start >= region.end) continue;
    if (other.start > region.start) parts.push_back({region.start, other.start});
    region.start = other.end;
  }
  if (region.start < region.end) parts.push_back(region);
  return parts;
}

// Whether nearly all pages of the huge page that begins at `start` are in memory.
bool Full(int pagemap, uintptr_t start) {
  std::vector<uint64_t> entries(kHuge / kPage);
  const size_t bytes = entries.size() * sizeof(uint64_t);
  if (pread(pagemap, entries.data(), bytes, static_cast<off_t>(start / kPage * sizeof(uint64_t))) !=
      static_cast<ssize_t>(bytes)) {
    return false;
  }
  const auto present = std::count_if(entries.begin(), entries.end(), [](uint64_t entry) { return entry >> 63 != 0; });
  return static_cast<double>(present) >= kResident * static_cast<double>(entries.size());
}

void Append(std::vector<Region>& runs, Region block) {
  if (!runs.empty() && runs.back().end == block.start) {
    runs.back().end = block.end;
  } else {
    runs.push_back(block);
  }
}

}  // namespace

HugePages::HugePages(std::vector<Region> regions) {
  if (regions.empty()) return;
  thread_ = std::thread([this, regions = std::move(regions)] {
    for (const Region& region : regions) {
      for (uintptr_t start = region.start; start < region.end; start += kStride) {
        if (stop_) return;
        madvise(Address(start), std::min(kStride, region.end - start), kCollapse);
      }
    }
  });
}

HugePages::~HugePages() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

std::vector<Region> AnonymousRegions() {
  return Regions(
      [](const std::string& rights, const std::string& path) { return rights == "rw-p" && (path.empty() || path == "[heap]"); });
}

std::vector<Region> FullBlocks(const std::vector<Region>& before) {
  std::vector<Region> runs;
  if (!Allowed()) return runs;
  const int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);  // a stream would read across its entries
  for (const Region& region : AnonymousRegions()) {
    for (const Region& part : Without(region, before)) {
      for (uintptr_t start = (part.start + kHuge - 1) / kHuge * kHuge; start + kHuge <= part.end; start += kHuge) {
        if (Full(pagemap, start)) Append(runs, {start, start + kHuge});
      }
    }
  }
  if (pagemap >= 0) close(pagemap);
  return runs;
}

void ReleaseLoadingMemory(const std::filesystem::path& bundle) {
  malloc_trim(0);  // glibc would keep it
  std::error_code none;
  const std::string folder = std::filesystem::weakly_canonical(bundle, none).string() + "/";
  const auto ours = [&folder](const std::string&, const std::string& path) { return path.rfind(folder, 0) == 0; };
  for (const Region& region : Regions(ours)) madvise(Address(region.start), region.end - region.start, MADV_DONTNEED);
}

}  // namespace skd
