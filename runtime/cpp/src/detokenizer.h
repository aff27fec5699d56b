// Token ids to text, byte for byte what Hugging Face's tokenizers give (by tokenizer.json).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace skd {

// GenAI's own decoding loses the text after bytes that are no UTF-8, which a model may write at any time.
class Detokenizer {
 public:
  // None where tokenizer.json names a way of decoding that is not known here. `special`: ids that are no text.
  // Throws SKD_ERROR_BUNDLE for a file that cannot be read.
  static std::optional<Detokenizer> Read(const std::filesystem::path& path, int64_t vocab_size, const std::set<int64_t>& special);

  // Ids from 0 to vocab_size - 1. UTF-8; each sequence of bytes that is none has become U+FFFD, ids without an entry are left
  // out.
  std::string Decode(const int64_t* ids, size_t count) const;

 private:
  using Pieces = std::vector<std::string>;
  using Step = std::function<void(Pieces*)>;
  struct Reader;

  std::vector<std::optional<std::string>> entries_;  // of the vocabulary, by id; none for special ids
  std::vector<Step> steps_;                          // from a text's entries to its pieces
};

}  // namespace skd
