// Which bytes are characters (Unicode, table 3-7).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace skd::utf8 {

constexpr char kReplacement[] = "\xEF\xBF\xBD";  // U+FFFD

// What a text begins with: a character, or bytes that are none; these end where a character may begin.
struct Sequence {
  size_t size;
  bool valid;
};

// Of a text that is not empty.
inline Sequence FirstOf(std::string_view text) {
  const auto byte = [text](size_t i) { return unsigned{static_cast<unsigned char>(text[i])}; };
  const auto within = [&](size_t i, unsigned low, unsigned high) { return i < text.size() && byte(i) >= low && byte(i) <= high; };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {1, true};
  if (lead < 0xC2 || lead > 0xF4) return {1, false};
  // the second byte rules out longer forms than needed, surrogates, and what lies beyond U+10FFFF
  const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (!within(1, low, high)) return {1, false};
  const size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  for (size_t i = 2; i < size; ++i) {
    if (!within(i, 0x80, 0xBF)) return {i, false};
  }
  return {size, true};
}

// UTF-8: each sequence of bytes that is none has become U+FFFD.
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
