// Parts of tokenizer.json that no tokenizer of test_tokenizer.py has.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "catch.h"
#include "detokenizer.h"

namespace {

std::string Decoded(const std::string& json, const std::vector<int64_t>& ids, int64_t vocab_size) {
  const auto path = std::filesystem::temp_directory_path() / ("skd_tokenizer_" + std::to_string(getpid()) + ".json");
  std::ofstream(path) << json;
  const auto read = skd::Detokenizer::Read(path, vocab_size, {0});
  std::filesystem::remove(path);
  REQUIRE(read);
  return read->Decode(ids.data(), ids.size());
}

}  // namespace

TEST_CASE("entries of a Unigram vocabulary are numbered by their places in a list") {
  const std::string json = R"({"decoder": {"type": "Metaspace", "replacement": "_"},
    "model": {"vocab": [["<s>", 0.0], ["_the", -1.5], ["_Mill", -2.5], ["s", -3.5]]}})";
  CHECK(Decoded(json, {0, 1, 2, 3}, 4) == "the Mills");
}

TEST_CASE("entries without weights in the model are skipped, and ids without an entry give no text") {
  const std::string json = R"({"decoder": {"type": "Fuse"}, "model": {"vocab": {"<s>": 0, "a": 1, "b": 4, "c": 9, "d": -1}},
    "added_tokens": [{"id": 2, "content": "<x>"}, {"id": 4, "content": "<y>"}]})";
  CHECK(Decoded(json, {0, 1, 3, 2, 1}, 4) == "a<x>a");
}
