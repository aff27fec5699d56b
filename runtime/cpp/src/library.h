// Libraries that are loaded when first needed, so that a missing one is an error with a remedy, not a crash at start.
#pragma once

#include <string>

namespace skd {

// Open the library at `path` or, if that is empty, `name` where the system looks for libraries. The caller may dlclose it.
// Throws SKD_ERROR_TARGET with `what` (the library's name for people) and `remedy`.
void* OpenLibrary(const std::string& path, const std::string& name, const std::string& what, const std::string& remedy);

// The path that an open library was loaded from.
std::string PathOf(void* library);

}  // namespace skd
