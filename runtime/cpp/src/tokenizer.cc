#include "tokenizer.h"

#include <dlfcn.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "error.h"
#include "library.h"
#include "token_ids.h"

namespace skd {

// As ort_genai_c.h of ONNX Runtime GenAI 0.18 declares them; opaque handles are void here.
struct GenAi {
  void* (*create_tokenizer)(const char* folder, void** tokenizer);
  void (*destroy_tokenizer)(void* tokenizer);
  void* (*update_options)(void* tokenizer, const char* const* keys, const char* const* values, size_t count);
  void* (*create_sequences)(void** sequences);
  void (*destroy_sequences)(void* sequences);
  void* (*encode)(const void* tokenizer, const char* text, void* sequences);
  size_t (*sequence_count)(const void* sequences, size_t index);
  const int32_t* (*sequence_data)(const void* sequences, size_t index);
  void* (*decode)(const void* tokenizer, const int32_t* ids, size_t count, const char** text);
  void (*destroy_string)(const char* text);
  const char* (*error)(const void* result);
  void (*destroy_result)(void* result);
};

namespace {

// A text, and what Hugging Face's tokenizer made of it.
struct Sample {
  std::string text;
  std::vector<int64_t> ids;
};

template <typename Function>
void Resolve(void* handle, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(handle, name));
  if (*function == nullptr) {
    throw TargetError(std::string("ONNX Runtime GenAI's library has no ") + name, "install onnxruntime-genai 0.18 or newer");
  }
}

GenAi LoadGenAi(const std::string& library) {
  void* handle = OpenLibrary(library, "libonnxruntime-genai.so", "ONNX Runtime GenAI, whose tokenizers this library uses,",
                             "install it, set LD_LIBRARY_PATH, or name it in skd_tokenizer_create");
  GenAi api{};
  Resolve(handle, "OgaCreateTokenizerFromPath", &api.create_tokenizer);
  Resolve(handle, "OgaDestroyTokenizer", &api.destroy_tokenizer);
  Resolve(handle, "OgaUpdateTokenizerOptions", &api.update_options);
  Resolve(handle, "OgaCreateSequences", &api.create_sequences);
  Resolve(handle, "OgaDestroySequences", &api.destroy_sequences);
  Resolve(handle, "OgaTokenizerEncode", &api.encode);
  Resolve(handle, "OgaSequencesGetSequenceCount", &api.sequence_count);
  Resolve(handle, "OgaSequencesGetSequenceData", &api.sequence_data);
  Resolve(handle, "OgaTokenizerDecode", &api.decode);
  Resolve(handle, "OgaDestroyString", &api.destroy_string);
  Resolve(handle, "OgaResultGetError", &api.error);
  Resolve(handle, "OgaDestroyResult", &api.destroy_result);
  return api;
}

const GenAi& Api(const std::string& library) {
  static const GenAi api = LoadGenAi(library);  // if this throws, the next call tries again
  return api;
}

void Check(const GenAi& api, void* result, const std::string& where) {
  if (result == nullptr) return;
  const std::string reason = Shortened(api.error(result), kMaxReasonBytes);
  api.destroy_result(result);
  throw Error(SKD_ERROR_TOKENIZER, "the tokenizer failed (" + reason + ")", "tokenise elsewhere and give token ids", where);
}

// Reads tokenization.json, which skip-export writes next to tokenizer.json.
nlohmann::json ReadTokenization(const std::filesystem::path& bundle) {
  const std::filesystem::path path = bundle / "tokenization.json";
  if (!std::filesystem::is_regular_file(path)) {
    throw Error(SKD_ERROR_TOKENIZER, "the bundle has no tokenizer", "give token ids", bundle.string());
  }
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

}  // namespace

Tokenizer::Tokenizer(std::shared_ptr<const Bundle> bundle, const std::string& library) : bundle_(std::move(bundle)) {
  ReadUnchanged(bundle_->path, bundle_->identity, "since it was loaded", [&] { Read(library); });
}

void Tokenizer::Read(const std::string& library) {
  const std::string folder = bundle_->path.string();
  std::vector<Sample> samples;
  try {
    const nlohmann::json data = ReadTokenization(bundle_->path);
    data.at("before").get_to(before_);
    data.at("after").get_to(after_);
    data.at("special").get_to(special_);
    for (const auto& sample : data.at("samples")) samples.push_back({sample.at("text"), sample.at("ids")});
  } catch (const nlohmann::json::exception& error) {
    throw BundleError("tokenization.json cannot be read (" + Shortened(error.what(), kMaxReasonBytes) + ")", folder);
  }
  detokenizer_ = Detokenizer::Read(bundle_->path / "tokenizer.json", bundle_->manifest.model.vocab_size, special_);
  api_ = &Api(library);
  void* created = nullptr;
  Check(*api_, api_->create_tokenizer(folder.c_str(), &created), folder);
  tokenizer_ = {created, api_->destroy_tokenizer};
  // Encode adds special tokens itself, as Hugging Face's tokenizer was seen to do: GenAI knows few of the ways to do it
  const char* const keys[] = {"add_special_tokens", "skip_special_tokens"};
  const char* const values[] = {"false", "true"};
  Check(*api_, api_->update_options(tokenizer_.get(), keys, values, 2), folder);
  for (const Sample& sample : samples) {
    if (Encode(sample.text.c_str()) == sample.ids) continue;
    throw Error(SKD_ERROR_TOKENIZER,
                "ONNX Runtime GenAI tokenises '" + Shortened(sample.text, kMaxReasonBytes) + "' differently from Hugging Face",
                "tokenise elsewhere and give token ids", folder);
  }
}

std::vector<int64_t> Tokenizer::Encode(const char* text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  void* sequences = nullptr;
  Check(*api_, api_->create_sequences(&sequences), "");
  const std::unique_ptr<void, void (*)(void*)> owner(sequences, api_->destroy_sequences);
  Check(*api_, api_->encode(tokenizer_.get(), text, sequences), "");
  const int32_t* ids = api_->sequence_data(sequences, 0);
  std::vector<int64_t> found = before_;
  found.insert(found.end(), ids, ids + api_->sequence_count(sequences, 0));
  found.insert(found.end(), after_.begin(), after_.end());
  return found;
}

std::string Tokenizer::Decode(const int64_t* ids, size_t count) {
  CheckIds(bundle_->manifest.model, ids, count);
  if (detokenizer_) return detokenizer_->Decode(ids, count);
  // GenAI would return U+FFFD if skipping special tokens left nothing
  if (std::all_of(ids, ids + count, [this](int64_t id) { return special_.count(id) > 0; })) return {};
  const std::vector<int32_t> narrow(ids, ids + count);
  const std::lock_guard<std::mutex> lock(mutex_);
  const char* text = nullptr;
  Check(*api_, api_->decode(tokenizer_.get(), narrow.data(), count, &text), "");
  const std::unique_ptr<const char, void (*)(const char*)> owner(text, api_->destroy_string);
  return text;
}

}  // namespace skd
