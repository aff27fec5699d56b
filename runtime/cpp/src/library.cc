#include "library.h"

#include <dlfcn.h>
#include <link.h>

#include "error.h"

namespace skd {

void* OpenLibrary(const std::string& path, const std::string& name, const std::string& what, const std::string& remedy) {
  void* handle = dlopen(path.empty() ? name.c_str() : path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw TargetError(what + " cannot be loaded (" + (reason == nullptr ? "unknown reason" : reason) + ")", remedy);
  }
  return handle;
}

std::string PathOf(void* library) {
  link_map* found = nullptr;
  return dlinfo(library, RTLD_DI_LINKMAP, &found) == 0 ? found->l_name : "";
}

}  // namespace skd
