// Text in, by ONNX Runtime GenAI's tokenizers (C API, no Python; token-exact where tests/cpp says so), and out.
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

// GenAI's library, loaded once; its functions by name.
struct GenAi;

class Tokenizer {
 public:
  // Throws SKD_ERROR_TOKENIZER (the bundle has no tokenizer, or one that GenAI cannot read, whatever the reason, or reads
  // differently than Hugging Face does, which the samples in tokenization.json show), SKD_ERROR_BUNDLE (tokenizer.json or
  // tokenization.json is damaged; another bundle is in its place by now), SKD_ERROR_TARGET (no library).
  Tokenizer(std::shared_ptr<const Bundle> bundle, const std::string& library);

  std::vector<int64_t> Encode(const char* text);
  std::string Decode(const int64_t* ids, size_t count);

 private:
  // All that is read of the bundle's folder.
  void Read();

  std::shared_ptr<const Bundle> bundle_;
  std::vector<int64_t> before_, after_;     // ids that encoding puts around a text's own
  std::set<int64_t> special_;               // ids that are no text
  std::optional<Detokenizer> detokenizer_;  // none: GenAI's decoding, of a kind that no model of ours has
  const GenAi& api_;
  std::unique_ptr<void, void (*)(void*)> tokenizer_{nullptr, nullptr};
  std::mutex mutex_;  // GenAI's objects are not thread safe
};

}  // namespace skd
