// Checks that the parts of a manifest fit each other, as the Python runtime does.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "manifest.h"

namespace skd {

// `kv_slots`: per layer how many of the schedule's positions need a slot, as bundle.json states it; nullopt: all of them.
// Throws SKD_ERROR_BUNDLE.
void CheckManifest(const Manifest& manifest, const std::vector<std::optional<int64_t>>& kv_slots);

// Whether a schedule computes some layers of a segment at positions at which it skips others.
bool CutsThroughSegment(const Schedule& schedule, const std::vector<std::vector<int64_t>>& segments);
// Whether a schedule skips a layer whose keys and values later layers read.
bool SkipsSource(const Schedule& schedule, const Model& model);

}  // namespace skd
