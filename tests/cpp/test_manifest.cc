// The manifest of SKD_TEST_BUNDLE, damaged field by field; the corpus and Python's attacks are replayed by pytest.
#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "error.h"
#include "manifest.h"

namespace {

using Json = nlohmann::json;

Json Whole() {
  std::ifstream file(std::string(std::getenv("SKD_TEST_BUNDLE")) + "/bundle.json");
  return Json::parse(file);
}

// As of a model whose layers are not all of one kind.
Json Hybrid() {
  Json edited = Whole();
  edited["model"]["linear_attention"] = {{"layers", {0, 1, 3}}, {"conv_state", {96, 3}}, {"recurrent_state", {4, 16, 24}}};
  return edited;
}

// Every place in the document.
void Places(const Json& data, const Json::json_pointer& here, std::vector<Json::json_pointer>* found) {
  if (!here.empty()) found->push_back(here);
  if (data.is_object()) {
    for (const auto& item : data.items()) Places(item.value(), here / item.key(), found);
  } else if (data.is_array()) {
    for (size_t i = 0; i < data.size(); ++i) Places(data[i], here / i, found);
  }
}

}  // namespace

TEST_CASE("the manifest is read") {
  const skd::Manifest manifest = skd::ParseManifest(Whole().dump());
  REQUIRE(manifest.model.num_layers == 6);
  REQUIRE(manifest.targets.size() == 1);
  REQUIRE_FALSE(manifest.model.linear_attention);
  const auto linear = skd::ParseManifest(Hybrid().dump()).model.linear_attention;
  REQUIRE(linear);
  REQUIRE(linear->layers == std::vector<int64_t>{0, 1, 3});
  REQUIRE(linear->conv_state == std::vector<int64_t>{96, 3});
  REQUIRE(linear->recurrent_state == std::vector<int64_t>{4, 16, 24});
}

TEST_CASE("every field of another type, or missing, is refused by name and never a crash") {
  const Json whole = Hybrid();
  std::vector<Json::json_pointer> places;
  Places(whole, Json::json_pointer(), &places);
  REQUIRE(places.size() > 100);
  const std::vector<Json> values = {nullptr, -1, 1e300, 18446744073709551615U, "", Json::array(), Json::object(), true, 2.5};
  for (const auto& place : places) {
    for (const Json& value : values) {
      Json damaged = whole;
      if (damaged[place] == value) continue;
      damaged[place] = value;
      try {
        skd::ParseManifest(damaged.dump());  // some values are as good as the old ones: a name, a hash
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

TEST_CASE("linear attention has layers of the model in their order, and sizes that an array can have") {
  const auto parse = [](const char* field, const std::vector<int64_t>& value) {
    Json edited = Hybrid();
    edited["model"]["linear_attention"][field] = value;
    skd::ParseManifest(edited.dump());
  };
  const auto refused = [&](const char* field, const std::vector<int64_t>& value) {
    INFO(field << " " << Catch::StringMaker<std::vector<int64_t>>::convert(value));
    REQUIRE_THROWS_WITH(parse(field, value),
                        Catch::Equals("bundle.json: model.linear_attention has no layers of the model, or sizes that are none; "
                                      "export the model again"));
  };
  const int64_t most = (int64_t{1} << 31) - 1;
  for (const std::vector<int64_t>& layers : {std::vector<int64_t>{-1, 2}, {1, 1}, {3, 1}, {0, 6}}) refused("layers", layers);
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{}, {96}, {96, 3, 1}, {0, 3}, {96, -3}, {most + 1, 3}}) {
    refused("conv_state", sizes);
  }
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{4, 16}, {4, 16, 24, 1}, {4, 0, 24}, {4, 16, most + 1}}) {
    refused("recurrent_state", sizes);
  }
  REQUIRE_NOTHROW(parse("layers", {}));
  REQUIRE_NOTHROW(parse("conv_state", {most, 3}));
}

TEST_CASE("sizes whose product no memory holds are refused, whichever of them is large") {
  const auto refused = [](const char* part, const char* field, const Json& value) {
    Json edited = Hybrid();
    edited["limits"]["max_batch"] = int64_t{1} << 31;
    edited[Json::json_pointer(part)][field] = value;
    REQUIRE_THROWS_WITH(skd::ParseManifest(edited.dump()), Catch::Contains("model and limits are too large for any memory"));
  };
  const int64_t heads = Whole()["model"]["num_kv_heads"], head_size = Whole()["model"]["head_size"];
  // fits for a layer, not for all six
  refused("/limits", "max_length", (int64_t{1} << 28) / (heads * head_size));
  refused("/model", "hidden_size", int64_t{1} << 31);                                  // fits a row, not all
  refused("/model/linear_attention", "conv_state", {1 << 20, 1 << 8});                 // fits for a layer, not for three
  refused("/model/linear_attention", "recurrent_state", {1 << 30, 1 << 30, 1 << 30});  // which no 64 bits count
}
