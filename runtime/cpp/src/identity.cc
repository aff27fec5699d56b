#include "identity.h"

#include <sys/stat.h>

#include <tuple>

#include "error.h"

namespace skd {
namespace {

auto Parts(const Identity& identity) {
  return std::tie(identity.device, identity.inode, identity.changed_s, identity.changed_ns);
}

}  // namespace

Identity IdentityOf(const std::filesystem::path& bundle) {
  struct stat found {};
  if (stat((bundle / "bundle.json").c_str(), &found) != 0) return {};
  return {found.st_dev, found.st_ino, found.st_mtim.tv_sec, found.st_mtim.tv_nsec};
}

void CheckIdentity(const std::filesystem::path& bundle, const Identity& loaded, const std::string& when) {
  if (Parts(IdentityOf(bundle)) == Parts(loaded)) return;
  throw Error(SKD_ERROR_BUNDLE, "was replaced " + when, "load it again", bundle.string());
}

}  // namespace skd
