// Checks the token ids that a caller gives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "manifest.h"

namespace skd {

// Throws SKD_ERROR_CAPACITY for an id outside the model's vocabulary.
void CheckIds(const Model& model, const int64_t* ids, size_t count, const std::string& where = "");

}  // namespace skd
