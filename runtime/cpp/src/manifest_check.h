// What the parts of a manifest must be to each other, as the Python runtime has it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "manifest.h"

namespace skd {

// `kv_slots`: of each layer, as bundle.json says them; nullopt: one a position. Throws SKD_ERROR_BUNDLE.
void CheckManifest(const Manifest& manifest, const std::vector<std::optional<int64_t>>& kv_slots);

}  // namespace skd
