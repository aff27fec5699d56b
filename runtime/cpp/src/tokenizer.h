// Text to token ids, by ONNX Runtime GenAI's tokenizers (C API, no Python; token-exact where tests/cpp checks it), and back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bundle.h"
#include "detokenizer.h"

namespace skd {

// The functions of GenAI's library, which is loaded once.
struct GenAi;

class Tokenizer {
 public:
  // Throws SKD_ERROR_TOKENIZER (the bundle has no tokenizer; GenAI cannot read it, whatever the reason; or GenAI tokenises a
  // sample in tokenization.json differently from Hugging Face), SKD_ERROR_BUNDLE (tokenizer.json or tokenization.json is
  // damaged, or another bundle has taken this one's place), SKD_ERROR_TARGET (no library).
  Tokenizer(std::shared_ptr<const Bundle> bundle, const std::string& library);

  std::vector<int64_t> Encode(const char* text);
  std::string Decode(const int64_t* ids, size_t count);

 private:
  // Everything that is read from the bundle's folder, and the library, which a bundle without a tokenizer does not need.
  void Read(const std::string& library);

  std::shared_ptr<const Bundle> bundle_;
  std::vector<int64_t> before_, after_;     // ids that encoding puts around a text's own
  std::set<int64_t> special_;               // ids that do not become text
  std::optional<Detokenizer> detokenizer_;  // nullopt: GenAI decodes; no model tested needs that
  const GenAi* api_ = nullptr;
  std::unique_ptr<void, void (*)(void*)> tokenizer_{nullptr, nullptr};
  std::mutex mutex_;  // GenAI's objects are not thread safe
};

}  // namespace skd
