// Libraries that are loaded when they are first needed, so that a missing one is an error with a remedy and no crash at start.
#pragma once

#include <string>

namespace skd {

// `path`, or where that is empty `name` as the system finds libraries. Stays loaded.
// Throws SKD_ERROR_TARGET with `what` (the library's human name) and `remedy`.
void* OpenLibrary(const std::string& path, const std::string& name, const std::string& what, const std::string& remedy);

// Where the system found an open library.
std::string PathOf(void* library);

}  // namespace skd
