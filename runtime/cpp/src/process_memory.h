// Returns the memory that only loading needed to the system.
#pragma once

#include <filesystem>
#include <vector>

namespace skd {

// Return the heap that loading used, and the pages that it read of the bundle's `files`, which are read again when needed. No
// other file's pages may be returned: a program or a library may lie in the bundle's folder, and it would lose what it has
// written to its pages.
void ReleaseLoadingMemory(const std::vector<std::filesystem::path>& files);

}  // namespace skd
