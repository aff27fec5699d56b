#include "cores.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

namespace skd {
namespace {

namespace fs = std::filesystem;

// Version 2 has quota and period in one file, version 1 in two. "max" and negative numbers mean that there is no quota.
std::optional<double> QuotaOf(const fs::path& group, bool version_1) {
  std::ifstream quota_file(group / (version_1 ? "cpu.cfs_quota_us" : "cpu.max"));
  std::ifstream period_file(group / "cpu.cfs_period_us");
  double quota = 0, period = 0;
  if (!(quota_file >> quota) || !((version_1 ? period_file : quota_file) >> period)) return std::nullopt;
  if (quota < 0 || period <= 0) return std::nullopt;
  return quota / period;
}

bool Lists(const std::string& controllers, const std::string& wanted) {
  std::istringstream names(controllers);
  for (std::string name; std::getline(names, name, ',');) {
    if (name == wanted) return true;
  }
  return false;
}

}  // namespace

std::optional<double> CpuQuota(const fs::path& membership, const fs::path& hierarchies) {
  std::optional<double> least;
  std::ifstream lines(membership);
  for (std::string line; std::getline(lines, line);) {  // "4:cpu,cpuacct:/the/group", in version 2 "0::/the/group"
    std::istringstream parts(line);
    std::string id, controllers, path;
    if (!std::getline(parts, id, ':') || !std::getline(parts, controllers, ':') || !std::getline(parts, path)) continue;
    const bool version_1 = !controllers.empty();
    if (version_1 && !Lists(controllers, "cpu")) continue;
    const fs::path top = version_1 ? hierarchies / "cpu" : hierarchies;
    // the group and its ancestors; a container may see its own group as the top one, yet its path as the host does
    for (fs::path relative = fs::path(path).relative_path();; relative = relative.parent_path()) {
      const std::optional<double> quota = QuotaOf(top / relative, version_1);
      if (quota) least = std::min(least.value_or(*quota), *quota);
      if (relative.empty()) break;
    }
  }
  return least;
}

int UsableCores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const int own = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
  const std::optional<double> quota = CpuQuota("/proc/self/cgroup", "/sys/fs/cgroup");
  return quota ? std::max(1, std::min(own, static_cast<int>(*quota))) : own;
}

}  // namespace skd
