// The cores that this process may use, as in runtime/cpu.py and runtime/control_group.py.
#pragma once

#include <filesystem>
#include <optional>

namespace skd {

// How many CPUs' time a process's control groups allow it: 1.5 for 150 ms in every 100 ms, nullopt for no limit.
// `membership`: the process's /proc/self/cgroup; `hierarchies`: /sys/fs/cgroup.
std::optional<double> CpuQuota(const std::filesystem::path& membership, const std::filesystem::path& hierarchies);

// How many cores this process may run on, but no more than a container's quota pays for.
int UsableCores();

}  // namespace skd
