// The cores that this process may use. As runtime/cpu.py and runtime/control_group.py.
#pragma once

#include <filesystem>
#include <optional>

namespace skd {

// CPUs' time that the control groups of a process allow it, 1.5 for 150 ms in every 100 ms; nullopt: all there is.
// `membership`: its /proc/self/cgroup; `hierarchies`: /sys/fs/cgroup.
std::optional<double> CpuQuota(const std::filesystem::path& membership, const std::filesystem::path& hierarchies);

// Those that this process may run on, and no more than a container's quota pays for.
int UsableCores();

}  // namespace skd
