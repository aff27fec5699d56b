// Errors as one line: what, where, what to do. Thrown inside the library; the C functions return them as a skd_status.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "skipdecode/skipdecode.h"

namespace skd {

class Error : public std::runtime_error {
 public:
  // `where` may be empty if `what` says it.
  Error(skd_code code, const std::string& what, const std::string& remedy, const std::string& where = "");
  skd_code code() const { return code_; }

 private:
  skd_code code_;
};

// `text` as valid UTF-8 without control characters, which would break the line or act on a terminal: names come from files
// and may hold anything.
std::string OneLine(const std::string& text);

// The first `most` bytes of a text, or a few fewer so that no UTF-8 character is cut in two.
std::string FirstBytes(const std::string& text, size_t most);
// The same of the last ones.
std::string LastBytes(const std::string& text, size_t most);
// A text from outside this library, for an error: where it has more than `most` bytes, it is cut and ends in "...".
std::string Shortened(const std::string& text, size_t most);
constexpr size_t kMaxReasonBytes = 200;  // of a reason that an error shows, since it may quote the file

Error BundleError(const std::string& what, const std::string& where);  // its remedy: export the model again
Error CapacityError(const std::string& what, const std::string& remedy, const std::string& where = "");
Error TargetError(const std::string& what, const std::string& remedy, const std::string& where = "");

}  // namespace skd
