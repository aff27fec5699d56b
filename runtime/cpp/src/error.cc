#include "error.h"

#include "utf8.h"

namespace skd {
namespace {

bool ContinuesCharacter(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }  // in UTF-8

}  // namespace

std::string OneLine(const std::string& text) {
  std::string line;
  for (const char c : text) {
    const bool control = static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
    if (!control) {
      line += c;
    } else if (!line.empty() && line.back() != ' ') {
      line += ' ';
    }
  }
  return utf8::Lossy(line);
}

Error::Error(skd_code code, const std::string& what, const std::string& remedy, const std::string& where)
    : std::runtime_error(OneLine((where.empty() ? "" : where + ": ") + what + (remedy.empty() ? "" : "; " + remedy))),
      code_(code) {}

std::string FirstBytes(const std::string& text, size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && ContinuesCharacter(text[most])) --most;
  return text.substr(0, most);
}

std::string Shortened(const std::string& text, size_t most) {
  const std::string dots = "...";
  return text.size() <= most ? text : FirstBytes(text, most - dots.size()) + dots;
}

std::string LastBytes(const std::string& text, size_t most) {
  if (text.size() <= most) return text;
  size_t start = text.size() - most;
  while (start < text.size() && ContinuesCharacter(text[start])) ++start;
  return text.substr(start);
}

Error BundleError(const std::string& what, const std::string& where) {
  return {SKD_ERROR_BUNDLE, what, "export the model again", where};
}

Error CapacityError(const std::string& what, const std::string& remedy, const std::string& where) {
  return {SKD_ERROR_CAPACITY, what, remedy, where};
}

Error TargetError(const std::string& what, const std::string& remedy, const std::string& where) {
  return {SKD_ERROR_TARGET, what, remedy, where};
}

}  // namespace skd
