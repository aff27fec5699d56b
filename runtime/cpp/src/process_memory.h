// What only loading needed of the process's memory goes back to the system.
#pragma once

#include <filesystem>
#include <vector>

namespace skd {

// Give back the heap that loading took, and the pages of the bundle's `files` that it read; both come again when they are
// needed. Nothing else may be given back: a program or a library may lie in the bundle's folder, and what it has written is
// gone with its pages.
void ReleaseLoadingMemory(const std::vector<std::filesystem::path>& files);

}  // namespace skd
