#include "cpu_features.h"

#include <sys/utsname.h>

#include <fstream>
#include <set>
#include <sstream>

namespace skd {

std::vector<std::string> CpuFeatures() {
  // those for which ONNX Runtime's MLAS chooses another matrix kernel, in the order of runtime/cpu.py
  static const char* const kKnownFeatures[] = {"avx",      "avx2",     "fma",   "avx512f", "avx512bw", "avx512_vnni", "avx_vnni",
                                               "amx_tile", "amx_int8", "asimd", "asimddp", "i8mm",     "sve"};
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0)) continue;
    std::istringstream words(line.substr(colon + 1));
    std::set<std::string> flags;
    for (std::string word; words >> word;) flags.insert(word);
    std::vector<std::string> found;
    for (const char* name : kKnownFeatures) {
      if (flags.count(name) > 0) found.emplace_back(name);
    }
    return found;
  }
  return {};
}

std::string Machine() {
  utsname names{};
  return uname(&names) == 0 ? names.machine : "";
}

}  // namespace skd
