// The manifest of SKD_TEST_BUNDLE, damaged field by field; the corpus and Python's attacks are replayed by pytest.
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "catch.h"
#include "error.h"
#include "manifest.h"

namespace {

using Json = nlohmann::json;

Json ManifestJson() {
  std::ifstream file(std::string(std::getenv("SKD_TEST_BUNDLE")) + "/bundle.json");
  return Json::parse(file);
}

// The manifest as for a model whose layers are not all of one kind.
Json HybridManifestJson() {
  Json edited = ManifestJson();
  const Json conv = {{"name", "conv_state"}, {"shape", {96, 3}}},
             recurrent = {{"name", "recurrent_state"}, {"shape", {4, 16, 24}}};
  const Json replaced = {{"layers", {1, 3}}, {"keys", nullptr}, {"keys_of", nullptr}, {"states", {conv, recurrent}}};
  const Json keys = {{"num_heads", 1}, {"head_size", 8}};
  const Json beside = {{"layers", {2}}, {"keys", keys}, {"keys_of", nullptr}, {"states", {conv}}};
  const Json reading = {{"layers", {4}}, {"keys", nullptr}, {"keys_of", 0}, {"states", Json::array()}};
  edited["model"]["state_layers"] = {replaced, beside, reading};
  return edited;
}

// Append a pointer to every place in the document.
void AppendPlaces(const Json& data, const Json::json_pointer& here, std::vector<Json::json_pointer>* found) {
  if (!here.empty()) found->push_back(here);
  if (data.is_object()) {
    for (const auto& item : data.items()) AppendPlaces(item.value(), here / item.key(), found);
  } else if (data.is_array()) {
    for (size_t i = 0; i < data.size(); ++i) AppendPlaces(data[i], here / i, found);
  }
}

}  // namespace

TEST_CASE("the manifest is read") {
  const skd::Manifest manifest = skd::ParseManifest(ManifestJson().dump());
  REQUIRE(manifest.model.num_layers == 6);
  REQUIRE(manifest.targets.size() == 1);
  REQUIRE(manifest.model.state_layers.empty());
  const auto groups = skd::ParseManifest(HybridManifestJson().dump()).model.state_layers;
  REQUIRE(groups.size() == 3);
  REQUIRE(groups[0].layers == std::vector<int64_t>{1, 3});
  REQUIRE_FALSE(groups[0].keys);
  REQUIRE(groups[0].states.size() == 2);
  REQUIRE(groups[0].states[1].name == "recurrent_state");
  REQUIRE(groups[0].states[1].shape == std::vector<int64_t>{4, 16, 24});
  REQUIRE(groups[1].keys->num_heads == 1);
  REQUIRE(groups[1].keys->head_size == 8);
  REQUIRE(groups[2].keys_of == 0);
}

TEST_CASE("every field that is missing or of another type is refused by name and never crashes") {
  const Json whole = HybridManifestJson();
  std::vector<Json::json_pointer> places;
  AppendPlaces(whole, Json::json_pointer(), &places);
  REQUIRE(places.size() > 100);
  const std::vector<Json> values = {nullptr, -1, 1e300, 18446744073709551615U, "", Json::array(), Json::object(), true, 2.5};
  for (const auto& place : places) {
    for (const Json& value : values) {
      Json damaged = whole;
      if (damaged[place] == value) continue;
      damaged[place] = value;
      try {
        skd::ParseManifest(damaged.dump());  // some values are as valid as the old ones: a name, a hash
      } catch (const skd::Error& error) {
        REQUIRE(error.code() == SKD_ERROR_BUNDLE);
        REQUIRE(std::string(error.what()).find('\n') == std::string::npos);
      }
    }
    if (!place.back().empty() && whole[place.parent_pointer()].is_object()) {
      Json damaged = whole;
      damaged[place.parent_pointer()].erase(place.back());
      REQUIRE_THROWS_AS(skd::ParseManifest(damaged.dump()), skd::Error);
    }
  }
}

TEST_CASE("a key that is shortened is cut between characters") {
  Json edited = ManifestJson();
  const std::string umlaut = "\xC3\xA4";
  std::string key = "x", shown = "x";
  while (key.size() < 60) key += umlaut;
  while (shown.size() < 37) shown += umlaut;
  edited[key] = 1;
  REQUIRE_THROWS_WITH(skd::ParseManifest(edited.dump()), Catch::Contains("has unknown key '" + shown + "...'"));
}

TEST_CASE("an existing manifest that cannot be read is not reported as missing") {
  const auto whole = std::filesystem::path(std::getenv("SKD_TEST_BUNDLE"));
  const auto folder = std::filesystem::temp_directory_path() / ("skd_unreadable_" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  REQUIRE_THROWS_WITH(skd::ReadManifest(folder), Catch::Contains("there is no bundle.json here"));
  // a link to itself, because permissions would not stop root
  std::filesystem::create_symlink("bundle.json", folder / "bundle.json");
  REQUIRE_THROWS_WITH(skd::ReadManifest(folder), Catch::EndsWith("bundle.json: cannot be read (Too many levels of symbolic "
                                                                 "links); check its name and permissions"));
  std::filesystem::remove_all(folder);
  rlimit files{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &files) == 0);
  const rlimit none{0, files.rlim_max};
  REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
  std::string line;
  try {
    skd::ReadManifest(whole);
  } catch (const skd::Error& error) {
    line = error.what();
  }
  REQUIRE(setrlimit(RLIMIT_NOFILE, &files) == 0);
  REQUIRE_THAT(line, Catch::EndsWith("bundle.json: cannot be read (Too many open files); check its name and permissions"));
}

TEST_CASE("layers read keys and values of layers below them that have their own and are computed at every position") {
  const auto refused = [](const char* place, const Json& value, const char* says) {
    Json edited = HybridManifestJson();
    edited["model"]["state_layers"][Json::json_pointer(place)] = value;
    INFO(place << " " << value);
    REQUIRE_THROWS_WITH(skd::ParseManifest(edited.dump()), Catch::Contains(says));
  };
  const char* const none = "read keys of layers that have none, or are above";
  refused("/2/keys_of", -1, none);
  refused("/2/keys_of", 4, none);
  refused("/2/keys_of", 5, none);
  refused("/2/keys_of", 3, none);
  refused("/2/keys", {{"num_heads", 1}, {"head_size", 8}}, none);
  refused("/2/layers", Json::array(), none);
  refused("/2/keys_of", 2, "skips layers whose keys and values later layers read");
  refused("/1/keys/num_heads", 0, "have layers out of range");
  refused("/1/keys/head_size", int64_t{1} << 31, "have layers out of range");
}

TEST_CASE("states belong to the model's layers, in order and once each, and have sizes that an array can have") {
  const auto parse = [](const char* place, const Json& value) {
    Json edited = HybridManifestJson();
    edited["model"]["state_layers"][Json::json_pointer(place)] = value;
    skd::ParseManifest(edited.dump());
  };
  const auto refused = [&](const char* place, const Json& value) {
    INFO(place << " " << value);
    REQUIRE_THROWS_WITH(
        parse(place, value),
        Catch::Equals("bundle.json: model.state_layers have layers out of range or twice, or parts without a size; "
                      "export the model again"));
  };
  const int64_t most = (int64_t{1} << 31) - 1;
  for (const std::vector<int64_t>& layers : {std::vector<int64_t>{-1, 1}, {1, 1}, {3, 1}, {1, 6}, {1, 2}}) {
    refused("/0/layers", layers);
  }
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{}, {0, 3}, {96, -3}, {most + 1, 3}}) {
    refused("/0/states/0/shape", sizes);
  }
  refused("/0/states/0/name", "recurrent_state");
  refused("/1/states/0/name", "value");
  REQUIRE_NOTHROW(parse("/0/layers", std::vector<int64_t>{}));
  REQUIRE_NOTHROW(parse("/0/states", Json::array()));
  REQUIRE_NOTHROW(parse("/0/states/0/name", "value"));  // this layer has no keys and values
  REQUIRE_NOTHROW(parse("/0/states/0/shape", {most, 3}));
}

TEST_CASE("sizes whose product exceeds any memory are refused, whichever of them is large") {
  const auto refused = [](const char* part, const char* field, const Json& value) {
    Json edited = HybridManifestJson();
    edited["limits"]["max_batch"] = int64_t{1} << 31;
    edited[Json::json_pointer(part)][field] = value;
    REQUIRE_THROWS_WITH(skd::ParseManifest(edited.dump()), Catch::Contains("model and limits are too large for any memory"));
  };
  const int64_t heads = ManifestJson()["model"]["num_kv_heads"], head_size = ManifestJson()["model"]["head_size"];
  // fits for one layer, not for all six
  refused("/limits", "max_length", (int64_t{1} << 28) / (heads * head_size));
  refused("/model", "hidden_size", int64_t{1} << 31);                               // fits for one row, not for all
  refused("/model/state_layers/0/states/0", "shape", {1 << 20, 1 << 9});            // fits for one layer, not for two
  refused("/model/state_layers/0/states/1", "shape", {1 << 30, 1 << 30, 1 << 30});  // overflows 64 bits
}
