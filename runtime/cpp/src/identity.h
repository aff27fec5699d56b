// Detects that another bundle has been put in a bundle's place, by an export with --force or a deployment that renames a
// folder or redirects a link. Files that are replaced one by one, with the same bundle.json, are not noticed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace skd {

// Tells one bundle.json from another at the same path; all 0: there is none.
struct Identity {
  uint64_t device = 0, inode = 0;
  int64_t changed_s = 0, changed_ns = 0;
};

Identity IdentityOf(const std::filesystem::path& bundle);

// Throws SKD_ERROR_BUNDLE if the folder `bundle` no longer holds the bundle that was `loaded`. `when`: for the message, such
// as "while it was loaded".
void CheckIdentity(const std::filesystem::path& bundle, const Identity& loaded, const std::string& when);

// Runs `read`, then throws as CheckIdentity if it may have read parts of another bundle. That error replaces any that `read`
// throws, since parts of two bundles may look damaged.
template <typename Read>
void ReadUnchanged(const std::filesystem::path& bundle, const Identity& loaded, const std::string& when, Read read) {
  try {
    read();
  } catch (...) {
    CheckIdentity(bundle, loaded, when);
    throw;
  }
  CheckIdentity(bundle, loaded, when);
}

}  // namespace skd
