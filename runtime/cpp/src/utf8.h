// Which bytes are UTF-8 characters (Unicode, table 3-7).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace skd::utf8 {

constexpr char kReplacement[] = "\xEF\xBF\xBD";  // U+FFFD

// What a text begins with: a character, or bytes that are not one, up to where a character may begin again.
struct Sequence {
  size_t size;
  bool valid;
};

// `text` must not be empty.
inline Sequence FirstOf(std::string_view text) {
  const auto byte = [text](size_t i) { return unsigned{static_cast<unsigned char>(text[i])}; };
  const auto within = [&](size_t i, unsigned low, unsigned high) { return i < text.size() && byte(i) >= low && byte(i) <= high; };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {1, true};
  if (lead < 0xC2 || lead > 0xF4) return {1, false};
  // the second byte's range rules out overlong forms, surrogates and code points beyond U+10FFFF
  const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (!within(1, low, high)) return {1, false};
  const size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  for (size_t i = 2; i < size; ++i) {
    if (!within(i, 0x80, 0xBF)) return {i, false};
  }
  return {size, true};
}

// `bytes` as valid UTF-8: each sequence that is not a character becomes U+FFFD.
inline std::string Lossy(std::string_view bytes) {
  std::string text;
  while (!bytes.empty()) {
    const Sequence first = FirstOf(bytes);
    text += first.valid ? bytes.substr(0, first.size) : kReplacement;
    bytes.remove_prefix(first.size);
  }
  return text;
}

}  // namespace skd::utf8
