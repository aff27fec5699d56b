#include "engine_failure.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>

namespace skd {
namespace {

bool Says(const std::string& said, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(), [&said](const char* each) { return said.find(each) != std::string::npos; });
}

// In the words of ONNX Runtime's arena, CUDA, cuBLAS or C++.
bool SaysNoMemory(const std::string& said) {
  return Says(said, {"Failed to allocate memory", "out of memory", "ALLOC_FAILED", "bad_alloc"});
}

Error NoMemory(const std::string& said, const std::string& remedy, const std::string& where = "") {
  const std::string size = "for requested buffer of size ";
  const size_t found = said.find(size);
  std::string asked;
  if (found != std::string::npos) {
    const uint64_t bytes = std::strtoull(said.c_str() + found + size.size(), nullptr, 10);
    asked = " for " + std::to_string((bytes >> 20) + ((bytes & 0xFFFFF) == 0 ? 0 : 1)) + " MiB";
  }
  return CapacityError("no memory is left" + asked, remedy, where);
}

}  // namespace

std::string Reason(const std::string& said) {
  constexpr size_t kMost = 400;  // bytes, so that the reason itself fits, which comes after node, source file and function
  const std::string line = said.substr(0, said.find('\n'));
  return line.empty() ? "no reason given" : Cut(line, kMost);
}

Error LoadFailure(const std::string& said, const std::string& where) {
  if (Says(said, {"GlobalThreadPools", "thread pool"})) {
    return TargetError("this process made an ONNX Runtime environment of its own first, so engines cannot share one thread pool",
                       "load the bundle before that, or make that one with global thread pools");
  }
  if (SaysNoMemory(said)) return NoMemory(said, "free some, or export with --quantize int4", where);
  if (Says(said, {"default CPU EP"})) {
    return TargetError("this ONNX Runtime cannot run all of it with CUDA (it would leave nodes to the CPU)",
                       "name a newer one in skd_load_options.onnxruntime_library, or export the model for cpu", where);
  }
  if (Says(said, {"CUDA"})) {
    return TargetError("ONNX Runtime cannot run it with CUDA (" + Reason(said) + ")",
                       "check nvidia-smi, and that cuBLAS and cuDNN of onnxruntime-gpu's CUDA are installed", where);
  }
  return BundleError("cannot be loaded (" + Reason(said) + ")", where);
}

Error RunFailure(const std::string& said, bool on_gpu, const std::string& where) {
  if (SaysNoMemory(said)) return NoMemory(said, "send fewer rows or shorter prompts");
  const std::string what = "ONNX Runtime stopped (" + Reason(said) + ")";
  if (on_gpu) return TargetError(what, "check nvidia-smi, and start again", where);
  return {SKD_ERROR_INTERNAL, what, "check the bundle with skip-inspect --check-hashes", where};
}

}  // namespace skd
