// Token ids to text, as tokenizer.json says and byte for byte as Hugging Face's tokenizers do it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace skd {

// Exists because GenAI's decoding loses the text after bytes that are not UTF-8, which a model may generate at any time.
class Detokenizer {
 public:
  // Returns nullopt if tokenizer.json names a decoder that is not known here. `special`: ids that do not become text.
  // Throws SKD_ERROR_BUNDLE if the file cannot be read.
  static std::optional<Detokenizer> Read(const std::filesystem::path& path, int64_t vocab_size, const std::set<int64_t>& special);

  // Returns valid UTF-8: invalid sequences of bytes become U+FFFD. Ids without an entry are left out. `ids` must be within
  // 0 .. vocab_size - 1.
  std::string Decode(const int64_t* ids, size_t count) const;

 private:
  using Pieces = std::vector<std::string>;
  using Step = std::function<void(Pieces*)>;
  struct Reader;

  std::vector<std::optional<std::string>> entries_;  // of the vocabulary, by id; none for special ids
  std::vector<Step> steps_;                          // from a text's entries to its pieces
};

}  // namespace skd
