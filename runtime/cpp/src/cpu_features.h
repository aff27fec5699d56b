// This CPU's instruction sets, for which prepacked weights are laid out. As in runtime/cpu.py.
#pragma once

#include <string>
#include <vector>

namespace skd {

// This CPU's instruction sets, of those by which ONNX Runtime chooses its matrix kernels; empty if the system lists none.
std::vector<std::string> CpuFeatures();

// "x86_64".
std::string Machine();

}  // namespace skd
