// A loaded bundle: the manifest and the engines of one target. Immutable, shared by all sessions.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "manifest.h"

namespace skd {

struct SegmentEngine {
  std::vector<int64_t> layers;
  Engine engine;
};

struct Bundle {
  std::filesystem::path path;
  Manifest manifest;
  Engine embed;
  std::vector<SegmentEngine> segments;  // lowest first
  Engine head;
  double load_s;
};

// Throws SKD_ERROR_BUNDLE, SKD_ERROR_TARGET.
std::shared_ptr<const Bundle> LoadBundle(const std::filesystem::path& path, const std::string& target, uint32_t threads,
                                         const std::string& onnxruntime_library);

}  // namespace skd
