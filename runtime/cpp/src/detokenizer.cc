#include "detokenizer.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "error.h"
#include "utf8.h"

namespace skd {
namespace {

using Json = nlohmann::json;
using Pieces = std::vector<std::string>;

unsigned Byte(char c) { return static_cast<unsigned char>(c); }

// The alphabet of byte-level BPE: printable bytes are written as themselves, the others as U+0100 and up.
constexpr size_t kAlphabetEnd = 0x144;

std::array<int, kAlphabetEnd> ByteLevelAlphabet() {
  std::array<int, kAlphabetEnd> bytes{};
  bytes.fill(-1);
  size_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool prints = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    bytes.at(prints ? static_cast<size_t>(byte) : next++) = byte;
  }
  return bytes;
}

// The bytes of an entry. An added token, which is not written in this alphabet, stays as it is.
std::string BytesOf(const std::string& entry) {
  static const std::array<int, kAlphabetEnd> alphabet = ByteLevelAlphabet();
  std::string bytes;
  for (size_t i = 0; i < entry.size(); ++i) {
    size_t character = Byte(entry[i]);
    if (character >= 0xE0) return entry;
    if (character >= 0x80) character = (character & 0x1FU) << 6U | (Byte(entry[++i]) & 0x3FU);
    if (character >= kAlphabetEnd || alphabet.at(character) < 0) return entry;
    bytes += static_cast<char>(alphabet.at(character));
  }
  return bytes;
}

void Fuse(Pieces* pieces) {
  std::string whole;
  for (const std::string& piece : *pieces) whole += piece;
  *pieces = {std::move(whole)};
}

void ByteLevel(Pieces* pieces) {
  std::string bytes;
  for (const std::string& piece : *pieces) bytes += BytesOf(piece);
  *pieces = {utf8::Lossy(bytes)};
}

// "<0x0A>": an entry that is one byte.
std::optional<char> FallbackByte(const std::string& entry) {
  if (entry.size() != 6 || entry.rfind("<0x", 0) != 0 || entry[5] != '>') return std::nullopt;
  const std::string digits = entry.substr(3, 2);
  if (digits.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) return std::nullopt;
  return static_cast<char>(std::stoi(digits, nullptr, 16));
}

// Adjacent bytes become text if they are valid UTF-8, otherwise each of them becomes U+FFFD.
void ByteFallback(Pieces* pieces) {
  Pieces found;
  std::string run;
  const auto end_run = [&] {
    bool valid = true;
    for (size_t i = 0; valid && i < run.size();) {
      const utf8::Sequence next = utf8::FirstOf(std::string_view(run).substr(i));
      valid = next.valid;
      i += next.size;
    }
    if (valid && !run.empty()) found.push_back(run);
    if (!valid) found.insert(found.end(), run.size(), utf8::kReplacement);
    run.clear();
  };
  for (std::string& piece : *pieces) {
    if (const std::optional<char> byte = FallbackByte(piece)) {
      run += *byte;
      continue;
    }
    end_run();
    found.push_back(std::move(piece));
  }
  end_run();
  *pieces = std::move(found);
}

void Replace(std::string* piece, const std::string& pattern, const std::string& content) {
  for (size_t at = piece->find(pattern); at != std::string::npos; at = piece->find(pattern, at + content.size())) {
    piece->replace(at, pattern.size(), content);
  }
}

void Strip(std::string* piece, const std::string& content, size_t start, size_t stop) {
  for (; start > 0 && piece->rfind(content, 0) == 0; --start) piece->erase(0, content.size());
  for (; stop > 0 && piece->size() >= content.size(); --stop) {
    if (piece->compare(piece->size() - content.size(), content.size(), content) != 0) break;
    piece->resize(piece->size() - content.size());
  }
}

}  // namespace

// Fills a Detokenizer from the parts of tokenizer.json.
struct Detokenizer::Reader {
  static void AddEntry(Detokenizer* to, const Json& id, const Json& content) {
    const auto index = id.get<int64_t>();
    if (index < 0 || index >= static_cast<int64_t>(to->entries_.size())) return;  // the model never generates it
    to->entries_[static_cast<size_t>(index)] = content.get<std::string>();
  }

  static void AddEntries(Detokenizer* to, const Json& data) {
    const Json& vocabulary = data.at("model").at("vocab");
    if (vocabulary.is_array()) {  // Unigram's, pairs of content and score
      for (size_t id = 0; id < vocabulary.size(); ++id) AddEntry(to, id, vocabulary[id].at(0));
    } else {
      for (const auto& [content, id] : vocabulary.items()) AddEntry(to, id, content);
    }
    if (!data.contains("added_tokens")) return;
    for (const Json& added : data["added_tokens"]) AddEntry(to, added.at("id"), added.at("content"));
  }

  // Returns whether every part of `decoder` is known.
  static bool AddSteps(Detokenizer* to, const Json& decoder) {
    const auto type = decoder.at("type").get<std::string>();
    auto& steps = to->steps_;
    const auto each = [&steps](std::function<void(std::string*)> change) {
      steps.emplace_back([change = std::move(change)](Pieces* pieces) {
        for (std::string& piece : *pieces) change(&piece);
      });
    };
    if (type == "Sequence") {
      const Json& parts = decoder.at("decoders");
      return std::all_of(parts.begin(), parts.end(), [to](const Json& part) { return AddSteps(to, part); });
    }
    if (type == "ByteLevel") {
      steps.emplace_back(ByteLevel);
    } else if (type == "ByteFallback") {
      steps.emplace_back(ByteFallback);
    } else if (type == "Fuse") {
      steps.emplace_back(Fuse);
    } else if (type == "Replace" && decoder.at("pattern").contains("String") && decoder["pattern"]["String"] != "") {
      each([pattern = decoder["pattern"]["String"].get<std::string>(),
            content = decoder.at("content").get<std::string>()](std::string* piece) { skd::Replace(piece, pattern, content); });
    } else if (type == "Strip" && decoder.at("content") != "") {
      each([content = decoder["content"].get<std::string>(), start = decoder.at("start").get<size_t>(),
            stop = decoder.at("stop").get<size_t>()](std::string* piece) { skd::Strip(piece, content, start, stop); });
    } else if (type == "Metaspace" && decoder.at("replacement") != "") {
      const bool never = decoder.value("prepend_scheme", "always") == "never" || !decoder.value("add_prefix_space", true);
      steps.emplace_back([space = decoder["replacement"].get<std::string>(), never](Pieces* pieces) {
        for (size_t i = 0; i < pieces->size(); ++i) skd::Replace(&(*pieces)[i], space, i == 0 && !never ? "" : " ");
      });
    } else {
      return false;
    }
    return true;
  }
};

std::optional<Detokenizer> Detokenizer::Read(const std::filesystem::path& path, int64_t vocab_size,
                                             const std::set<int64_t>& special) {
  Detokenizer read;
  read.entries_.resize(static_cast<size_t>(vocab_size));
  try {
    std::ifstream file(path);
    // merges are most of the file and not needed; what is needed does not nest deeply
    const Json data = Json::parse(file, [](int depth, Json::parse_event_t event, Json& parsed) {
      return depth < 16 && (event != Json::parse_event_t::key || parsed != "merges");
    });
    if (data.at("decoder").is_null() || !Reader::AddSteps(&read, data["decoder"])) return std::nullopt;
    Reader::AddEntries(&read, data);
  } catch (const Json::exception& error) {  // about a value that is missing or of another type
    throw BundleError("cannot be read (" + Shortened(error.what(), kMaxReasonBytes) + ")", path.string());
  }
  for (const int64_t id : special) {
    if (id >= 0 && id < vocab_size) read.entries_[static_cast<size_t>(id)].reset();
  }
  return read;
}

std::string Detokenizer::Decode(const int64_t* ids, size_t count) const {
  Pieces pieces;
  for (const int64_t* id = ids; id != ids + count; ++id) {
    const auto index = static_cast<size_t>(*id);
    if (entries_[index]) pieces.push_back(*entries_[index]);
  }
  for (const Step& step : steps_) step(&pieces);
  Fuse(&pieces);
  return std::move(pieces.front());
}

}  // namespace skd
