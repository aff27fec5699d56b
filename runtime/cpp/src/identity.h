// Which bundle a folder holds: another may be put in its place, by an export with --force or a deployment that renames a folder
// or turns a link. Of files that are replaced one by one below the same bundle.json it knows nothing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace skd {

// What another bundle.json of the same name differs in; all 0: there is none.
struct Identity {
  uint64_t device = 0, inode = 0;
  int64_t changed_s = 0, changed_ns = 0;
};

Identity IdentityOf(const std::filesystem::path& bundle);

// Throws SKD_ERROR_BUNDLE where `bundle` is another than `loaded` by now. `when`: of that, "while it was loaded".
void CheckIdentity(const std::filesystem::path& bundle, const Identity& loaded, const std::string& when);

// Runs `read`: what it reads of `bundle` is of the one that is `loaded`, or this throws as CheckIdentity; also where `read`
// throws, since parts of two bundles may look damaged.
template <typename Read>
void ReadOne(const std::filesystem::path& bundle, const Identity& loaded, const std::string& when, Read read) {
  try {
    read();
  } catch (...) {
    CheckIdentity(bundle, loaded, when);
    throw;
  }
  CheckIdentity(bundle, loaded, when);
}

}  // namespace skd
