// What only loading needed of the process's memory goes back to the system.
#pragma once

#include <filesystem>

namespace skd {

// Give back the heap that loading took, and the pages of the bundle's files that it read; both come again when they are needed.
void ReleaseLoadingMemory(const std::filesystem::path& bundle);

}  // namespace skd
