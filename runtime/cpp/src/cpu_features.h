// Which instruction sets this CPU has: prepacked weights are laid out for them. As runtime/cpu.py.
#pragma once

#include <string>
#include <vector>

namespace skd {

// Among those that ONNX Runtime's matrix kernels are chosen by; empty where the system does not say.
std::vector<std::string> CpuFeatures();

// "x86_64".
std::string Machine();

}  // namespace skd
