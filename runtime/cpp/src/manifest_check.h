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

}  // namespace skd
