// How much of the CPU control groups leave, read from files as the kernel writes them, in a temporary folder.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "catch.h"
#include "cores.h"

namespace {

namespace fs = std::filesystem;

// Stands in for /sys/fs/cgroup; deletes its files when it is destroyed.
class Tree {
 public:
  Tree() { fs::create_directories(root_); }
  ~Tree() { fs::remove_all(root_); }
  Tree(const Tree&) = delete;
  Tree& operator=(const Tree&) = delete;

  void Write(const fs::path& file, const std::string& text) const {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text << "\n";
  }

  std::optional<double> QuotaOf(const std::string& membership) const {
    Write("membership", membership);
    return skd::CpuQuota(root_ / "membership", root_);
  }

 private:
  fs::path root_ = fs::temp_directory_path() / ("skd_cores_" + std::to_string(getpid()));
};

}  // namespace

TEST_CASE("the smallest quota of a group and its parents counts, in either version") {
  const Tree tree;
  CHECK(tree.QuotaOf("0::/pods/one") == std::nullopt);
  tree.Write("pods/one/cpu.max", "max 100000");
  CHECK(tree.QuotaOf("0::/pods/one") == std::nullopt);
  tree.Write("pods/cpu.max", "250000 100000");
  CHECK(tree.QuotaOf("0::/pods/one") == 2.5);
  tree.Write("pods/one/cpu.max", "400000 100000");
  CHECK(tree.QuotaOf("0::/pods/one") == 2.5);
  CHECK(tree.QuotaOf("0::/elsewhere") == std::nullopt);

  tree.Write("cpu/job/cpu.cfs_quota_us", "-1");
  tree.Write("cpu/job/cpu.cfs_period_us", "50000");
  CHECK(tree.QuotaOf("3:cpuset:/\n2:cpu,cpuacct:/job\n0::/") == std::nullopt);
  tree.Write("cpu/job/cpu.cfs_quota_us", "75000");
  CHECK(tree.QuotaOf("3:cpuset:/\n2:cpu,cpuacct:/job\n0::/") == 1.5);
}

TEST_CASE("a container that sees its group as the root finds its quota under the host's path too") {
  const Tree tree;
  tree.Write("cpu.max", "100000 100000");
  CHECK(tree.QuotaOf("0::/docker/0123") == 1.0);
}
