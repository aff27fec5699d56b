#include "process_memory.h"

#include <malloc.h>
#include <sys/mman.h>

#include <cstdint>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <system_error>

namespace skd {

void ReleaseLoadingMemory(const std::vector<std::filesystem::path>& files) {
  malloc_trim(0);  // glibc would keep the freed heap
  std::error_code ignored;
  std::set<std::string> names;  // with links resolved, as the system lists them
  for (const std::filesystem::path& file : files) names.insert(std::filesystem::weakly_canonical(file, ignored).string());
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    uintptr_t start = 0, end = 0;
    char dash = 0;
    std::string rights, offset, device, inode, path;
    words >> std::hex >> start >> dash >> end >> rights >> offset >> device >> inode >> std::ws;
    std::getline(words, path);
    if (path.empty() || names.count(path) == 0) continue;
    madvise(reinterpret_cast<void*>(start), end - start, MADV_DONTNEED);  // NOLINT(performance-no-int-to-ptr)
  }
}

}  // namespace skd
