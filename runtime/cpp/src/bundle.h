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
  Identity identity;  // of the bundle that was loaded from `path`
  Manifest manifest;
  Memory memory;      // where its engines read and write
  Block tied_weight;  // shared by embedding and head; empty if they share none
  Engine embed;
  std::vector<SegmentEngine> segments;  // lowest first
  Engine head;
  double load_s;
};

// Load the bundle in the folder `path`. `target`: nullopt means cpu, or cuda if the bundle has no cpu engines. `cuda_graphs`:
// as for Engine. `device`: nullopt means the target's own. Engines for a GPU run on a CPU too, so that they can be checked
// there. Throws SKD_ERROR_BUNDLE, SKD_ERROR_TARGET, SKD_ERROR_CAPACITY.
std::shared_ptr<const Bundle> LoadBundle(const std::filesystem::path& path, const std::optional<std::string>& target,
                                         uint32_t threads, const std::string& onnxruntime_library, bool cuda_graphs = true,
                                         std::optional<Device> device = std::nullopt);

}  // namespace skd
