// A loaded bundle: the manifest and the engines of one target. Immutable, shared by all sessions.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine.h"
#include "identity.h"
#include "manifest.h"
#include "memory.h"

namespace skd {

struct SegmentEngine {
  std::vector<int64_t> layers;
  Engine engine;
};

struct Bundle {
  std::filesystem::path path;
  Identity identity;  // of what was loaded from there
  Manifest manifest;
  Memory memory;      // what its engines read and write
  Block tied_weight;  // embedding and head share it, where there is one
  Engine embed;
  std::vector<SegmentEngine> segments;  // lowest first
  Engine head;
  double load_s;
};

// `target`: none: cpu, or cuda where the bundle has no cpu engines. `cuda_graphs`: as Engine's. `device`: none: the target's
// own. Engines for a GPU run on a CPU too, where they can be checked.
// Throws SKD_ERROR_BUNDLE, SKD_ERROR_TARGET, SKD_ERROR_CAPACITY.
std::shared_ptr<const Bundle> LoadBundle(const std::filesystem::path& path, const std::optional<std::string>& target,
                                         uint32_t threads, const std::string& onnxruntime_library, bool cuda_graphs = true,
                                         std::optional<Device> device = std::nullopt);

}  // namespace skd
