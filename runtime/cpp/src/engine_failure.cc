#include "engine_failure.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>

namespace skd {
namespace {

bool ContainsAny(const std::string& message, std::initializer_list<const char*> phrases) {
  return std::any_of(phrases.begin(), phrases.end(),
                     [&message](const char* phrase) { return message.find(phrase) != std::string::npos; });
}

// In the words of ONNX Runtime's arena, CUDA, cuBLAS or C++.
bool IsOutOfMemory(const std::string& message) {
  return ContainsAny(message, {"Failed to allocate memory", "out of memory", "ALLOC_FAILED", "bad_alloc"});
}

Error NoMemory(const std::string& message, const std::string& remedy, const std::string& where = "") {
  const std::string size = "for requested buffer of size ";
  const size_t found = message.find(size);
  std::string needed;
  if (found != std::string::npos) {
    const uint64_t bytes = std::strtoull(message.c_str() + found + size.size(), nullptr, 10);
    needed = " for " + std::to_string((bytes >> 20) + ((bytes & 0xFFFFF) == 0 ? 0 : 1)) + " MiB";
  }
  return CapacityError("no memory is left" + needed, remedy, where);
}

}  // namespace

std::string Reason(const std::string& message) {
  // what failed comes first and may have a name of any length, then come source file and function, and last the reason itself
  constexpr size_t kMaxFirstBytes = 100, kMaxLastBytes = 297;
  const std::string gap = "...";
  std::string line = message.substr(0, message.find('\n'));
  if (line.empty()) return "no reason given";
  if (line.size() <= kMaxFirstBytes + gap.size() + kMaxLastBytes) return line;
  return FirstBytes(line, kMaxFirstBytes) + gap + LastBytes(line, kMaxLastBytes);
}

Error LoadFailure(const std::string& message, const std::string& where) {
  if (ContainsAny(message, {"GlobalThreadPools", "thread pool"})) {
    return TargetError("this process made an ONNX Runtime environment of its own first, so engines cannot share one thread pool",
                       "load the bundle first, or create that environment with global thread pools");
  }
  if (IsOutOfMemory(message)) return NoMemory(message, "free some, or export with --quantize int4", where);
  if (ContainsAny(message, {"default CPU EP"})) {
    return TargetError("this ONNX Runtime cannot run all of it with CUDA (it would leave nodes to the CPU)",
                       "name a newer one in skd_load_options.onnxruntime_library, or export the model for cpu", where);
  }
  if (ContainsAny(message, {"CUDA"})) {
    return TargetError("ONNX Runtime cannot run it with CUDA (" + Reason(message) + ")",
                       "check nvidia-smi, and that cuBLAS and cuDNN of onnxruntime-gpu's CUDA are installed", where);
  }
  return BundleError("cannot be loaded (" + Reason(message) + ")", where);
}

Error RunFailure(const std::string& message, bool on_gpu, const std::string& where) {
  if (IsOutOfMemory(message)) return NoMemory(message, "send fewer rows or shorter prompts");
  const std::string what = "ONNX Runtime stopped (" + Reason(message) + ")";
  if (on_gpu) return TargetError(what, "check nvidia-smi, and start again", where);
  return {SKD_ERROR_INTERNAL, what, "check the bundle with skip-inspect --check-hashes", where};
}

}  // namespace skd
