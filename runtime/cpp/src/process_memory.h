// The process's memory around loading engines: what only loading needed goes back, what stays goes into huge pages.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <thread>
#include <vector>

namespace skd {

struct Region {
  uintptr_t start, end;
};

// Puts memory into huge pages in a thread of its own, because that can take seconds; the content stays where it is. ONNX Runtime
// packs quantised weights into memory of its own, and a decode step reads all of it: in pages of 4 KiB that is a walk through the
// page table every 4 KiB, twice as deep in a virtual machine. What the system refuses stays as it is.
class HugePages {
 public:
  explicit HugePages(std::vector<Region> regions);
  ~HugePages();
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// Private writable memory that no file stands behind.
std::vector<Region> AnonymousRegions();

// Runs of huge pages' size in memory that is not in `before` and of which nearly all is in use; none where the administrator has
// switched huge pages off.
std::vector<Region> FullBlocks(const std::vector<Region>& before);

// Give back the heap that loading took, and the pages of the bundle's files that it read; both come again when they are needed.
void ReleaseLoadingMemory(const std::filesystem::path& bundle);

}  // namespace skd
