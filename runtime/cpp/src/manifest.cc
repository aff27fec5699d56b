#include "manifest.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <sstream>
#include <utility>

#include "error.h"

namespace skd {
namespace {

using Json = nlohmann::json;

constexpr int64_t kFormatVersion = 4;
constexpr size_t kShown = 40;  // characters of a wrong value that an error shows

Error Malformed(const std::string& where, const std::string& what) { return BundleError(where + " " + what, "bundle.json"); }

// Short, and safe on values of any size and depth.
std::string Shown(const Json& data) {
  if (data.is_object() || data.is_array()) return data.is_array() ? "a list" : "an object";
  std::string text = data.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() > kShown ? text.substr(0, kShown) + "..." : text;
}

// An object whose keys are exactly those that were announced.
class Object {
 public:
  Object(const Json& data, std::string where, std::initializer_list<const char*> keys) : data_(data), where_(std::move(where)) {
    const std::string name = where_.empty() ? "the manifest" : where_;
    if (!data.is_object()) throw Malformed(name, "is " + Shown(data) + ", not an object");
    const std::set<std::string> known(keys.begin(), keys.end());
    for (const auto& item : data.items()) {
      if (known.count(item.key()) == 0) throw Malformed(name, "has unknown key '" + item.key().substr(0, kShown) + "'");
    }
    for (const std::string& key : known) {
      if (!data.contains(key)) throw Malformed(name, "has missing key '" + key + "'");
    }
  }

  const Json& at(const char* key) const { return data_.at(key); }
  std::string Where(const char* key) const { return where_.empty() ? key : where_ + "." + key; }
  int64_t Integer(const char* key) const { return ToInteger(at(key), Where(key)); }
  std::string Text(const char* key) const { return ToText(at(key), Where(key)); }
  std::optional<std::string> TextOrNull(const char* key) const {
    return at(key).is_null() ? std::nullopt : std::optional<std::string>(Text(key));
  }
  std::optional<int64_t> IntegerOrNull(const char* key) const {
    return at(key).is_null() ? std::nullopt : std::optional<int64_t>(Integer(key));
  }
  std::vector<int64_t> Integers(const char* key) const { return List<int64_t>(at(key), Where(key), ToInteger); }
  std::vector<std::string> Texts(const char* key) const { return List<std::string>(at(key), Where(key), ToText); }

  template <typename T, typename Decode>
  std::vector<T> Items(const char* key, Decode decode) const {
    return List<T>(at(key), Where(key), decode);
  }

  static int64_t ToInteger(const Json& data, const std::string& where) {
    const bool fits =
        data.is_number_integer() && !(data.is_number_unsigned() && data.get<uint64_t>() > std::numeric_limits<int64_t>::max());
    if (!fits) throw Malformed(where, "is " + Shown(data) + ", not a whole number below 2**63");
    return data.get<int64_t>();
  }

  static std::string ToText(const Json& data, const std::string& where) {
    if (!data.is_string()) throw Malformed(where, "is " + Shown(data) + ", not a string");
    return data.get<std::string>();
  }

  template <typename T, typename Decode>
  static std::vector<T> List(const Json& data, const std::string& where, Decode decode) {
    if (!data.is_array()) throw Malformed(where, "is " + Shown(data) + ", not a list");
    std::vector<T> items;
    items.reserve(data.size());
    for (size_t i = 0; i < data.size(); ++i) items.push_back(decode(data[i], where + "[" + std::to_string(i) + "]"));
    return items;
  }

 private:
  const Json& data_;
  std::string where_;
};

State DecodeState(const Json& data, const std::string& where) {
  const Object o(data, where, {"name", "shape"});
  return {o.Text("name"), o.Integers("shape")};
}

std::optional<Keys> DecodeKeys(const Json& data, const std::string& where) {
  if (data.is_null()) return std::nullopt;
  const Object o(data, where, {"num_heads", "head_size"});
  return Keys{o.Integer("num_heads"), o.Integer("head_size")};
}

StateLayers DecodeStateLayers(const Json& data, const std::string& where) {
  const Object o(data, where, {"layers", "keys", "keys_of", "states"});
  return {o.Integers("layers"), DecodeKeys(o.at("keys"), o.Where("keys")), o.IntegerOrNull("keys_of"),
          o.Items<State>("states", DecodeState)};
}

Model DecodeModel(const Json& data) {
  const Object o(data, "model",
                 {"name", "model_type", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "vocab_size",
                  "num_parameters", "state_layers", "eos_token_ids"});
  return {o.Text("name"),
          o.Text("model_type"),
          o.Integer("num_layers"),
          o.Integer("hidden_size"),
          o.Integer("num_heads"),
          o.Integer("num_kv_heads"),
          o.Integer("head_size"),
          o.Integer("vocab_size"),
          o.Integer("num_parameters"),
          o.Items<StateLayers>("state_layers", DecodeStateLayers),
          o.Integers("eos_token_ids")};
}

Schedule DecodeSchedule(const Json& data) {
  const Object o(data, "schedule", {"name", "num_layers", "warmup_layers", "layers", "anchor"});
  o.Text("name");  // how it was made, for people
  const std::string anchor = o.Text("anchor");
  if (anchor != "generated" && anchor != "absolute") throw Malformed("schedule.anchor", "is not generated or absolute");
  return {o.Integer("num_layers"), o.Integer("warmup_layers"), o.Integers("layers"),
          anchor == "absolute" ? Anchor::kAbsolute : Anchor::kGenerated};
}

Variant DecodeVariant(const Json& data, const std::string& where) {
  const Object o(data, where, {"name", "num_layers", "segments", "graph"});
  return {o.Text("name"), o.Integer("num_layers"), o.Integers("segments"), o.TextOrNull("graph")};
}

Target DecodeTarget(const Json& data, const std::string& where) {
  const Object o(data, where,
                 {"name", "weights", "library", "library_version", "machine", "cpu_features", "embed", "segments", "head",
                  "tied_weight", "segment_weight_bytes", "head_weight_bytes"});
  return {o.Text("name"),
          o.Text("weights"),
          o.Text("library"),
          o.Text("library_version"),
          o.Text("machine"),
          o.Texts("cpu_features"),
          o.Text("embed"),
          o.Texts("segments"),
          o.Text("head"),
          o.TextOrNull("tied_weight"),
          o.Integers("segment_weight_bytes"),
          o.Integer("head_weight_bytes")};
}

File DecodeFile(const Json& data, const std::string& where) {
  const Object o(data, where, {"path", "size", "sha256"});
  return {o.Text("path"), o.Integer("size"), o.Text("sha256")};
}

// Whether the layers of `group` keep arrays of sizes that are some, each under a name of its own.
bool KeptOnce(const StateLayers& group) {
  const auto is_size = [](int64_t size) { return size > 0 && size < int64_t{1} << 31; };
  std::set<std::string> names;
  if (group.keys) {
    if (!is_size(group.keys->num_heads) || !is_size(group.keys->head_size)) return false;
    names = {"key", "value"};
  }
  return std::all_of(group.states.begin(), group.states.end(), [&](const State& state) {
    return names.insert(state.name).second && !state.shape.empty() &&
           std::all_of(state.shape.begin(), state.shape.end(), is_size);
  });
}

void CheckStates(const Model& model) {
  std::set<int64_t> seen;
  const auto among_layers = [&](int64_t layer) { return layer >= 0 && layer < model.num_layers && seen.insert(layer).second; };
  for (const StateLayers& group : model.state_layers) {
    const auto& layers = group.layers;
    const bool holds = std::is_sorted(layers.begin(), layers.end()) && std::all_of(layers.begin(), layers.end(), among_layers);
    if (!holds || !KeptOnce(group)) {
      throw Malformed("model.state_layers", "have layers that are none, or twice, or states that are none");
    }
  }
}

// Layers whose keys others read are below those, have their own, and are computed at every position.
void CheckSources(const Manifest& manifest) {
  for (const StateLayers& group : manifest.model.state_layers) {
    if (!group.keys_of) continue;
    const int64_t source = *group.keys_of;
    const bool below = source >= 0 && !group.layers.empty() && source < group.layers.front();
    if (group.keys || !below || !manifest.model.Kept(source).keys) {
      throw Malformed("model.state_layers", "read keys of layers that have none, or are above");
    }
    if (manifest.schedule.Cap(source)) throw Malformed("the schedule", "skips layers whose keys and values later layers read");
  }
}

// Of a row, with keys and values of `length` positions for each layer; in double, which no size overflows.
double StateNumbers(const Model& model, int64_t length) {
  const auto product = [](const std::vector<int64_t>& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), 1.0, std::multiplies<>());
  };
  double numbers = product({2, model.num_layers, model.num_kv_heads, model.head_size, length});
  for (const StateLayers& group : model.state_layers) {
    const auto layers = static_cast<int64_t>(group.layers.size());
    if (group.keys) numbers += product({2, layers, group.keys->num_heads, group.keys->head_size, length});
    for (const State& state : group.states) numbers += static_cast<double>(layers) * product(state.shape);
  }
  return numbers;
}

void CheckSizes(const Manifest& manifest) {
  const Model& m = manifest.model;
  for (const int64_t size :
       {m.num_layers, m.hidden_size, m.num_heads, m.num_kv_heads, m.head_size, m.vocab_size, m.num_parameters}) {
    if (size <= 0) throw Malformed("model", "has sizes that are not positive numbers below 2**63");
  }
  if (manifest.limits.max_length <= 0 || manifest.limits.max_batch <= 0) {
    throw Malformed("limits", "are not positive numbers below 2**63");
  }
  // what the runtime multiplies must not overflow: a KV buffer, logits, hidden states
  const auto length = static_cast<double>(manifest.limits.max_length), rows = static_cast<double>(manifest.limits.max_batch);
  const double state = StateNumbers(m, manifest.limits.max_length) * rows;
  const double logits = static_cast<double>(m.vocab_size) * rows;
  const double hidden = static_cast<double>(m.hidden_size) * std::max(length, rows);
  if (4.0 * std::max({state, logits, hidden}) > 0x1p62) {
    throw Malformed("model and limits", "are too large for any memory");
  }
}

void CheckSegments(const Manifest& manifest) {
  int64_t next = 0;
  for (const auto& segment : manifest.segments) {
    for (const int64_t layer : segment) {
      if (layer != next++) throw Malformed("segments", "do not cover each layer once");
    }
    if (segment.empty()) throw Malformed("segments", "do not cover each layer once");
  }
  if (next != manifest.model.num_layers) throw Malformed("segments", "do not cover each layer once");
  for (const auto& segment : manifest.segments) {
    for (const int64_t layer : segment) {
      if (manifest.schedule.Cap(layer) != manifest.schedule.Cap(segment.front())) {
        throw Malformed("segments", "are cut through by the schedule");
      }
    }
  }
}

void CheckVariants(const Manifest& manifest) {
  const Schedule& schedule = manifest.schedule;
  std::set<int64_t> seen;
  std::set<int64_t> wanted(schedule.layers().begin(), schedule.layers().end());
  wanted.insert(manifest.model.num_layers);
  for (const Variant& variant : manifest.variants) {
    const std::string wrong = variant.name + " does not climb its layers";
    if (!seen.insert(variant.num_layers).second) throw Malformed("variants:", variant.name + " is there twice");
    if (variant.num_layers < 1 || variant.num_layers > manifest.model.num_layers) throw Malformed("variants:", wrong);
    std::vector<int64_t> layers;
    for (const int64_t index : variant.segments) {
      if (index < 0 || index >= static_cast<int64_t>(manifest.segments.size())) throw Malformed("variants:", wrong);
      const auto& segment = manifest.segments[static_cast<size_t>(index)];
      layers.insert(layers.end(), segment.begin(), segment.end());
      if (layers.size() > static_cast<size_t>(manifest.model.num_layers)) throw Malformed("variants:", wrong);
    }
    if (layers != ActiveLayers(manifest.model.num_layers, schedule.warmup_layers(), variant.num_layers)) {
      throw Malformed("variants:", wrong);
    }
    wanted.erase(variant.num_layers);
  }
  if (!wanted.empty()) throw Malformed("variants", "lack one");
}

void CheckTargets(const Manifest& manifest) {
  for (const Target& target : manifest.targets) {
    if (target.segments.size() != manifest.segments.size()) throw Malformed("targets", "lack an engine for a segment");
    std::vector<int64_t> sizes = target.segment_weight_bytes;
    sizes.push_back(target.head_weight_bytes);
    if (sizes.size() != target.segments.size() + 1 || *std::min_element(sizes.begin(), sizes.end()) <= 0) {
      throw Malformed("targets", "do not say how many bytes of weights each engine has");
    }
  }
}

void CheckPaths(const Manifest& manifest) {
  std::set<std::string> known;
  for (const File& file : manifest.files) known.insert(file.path);
  std::vector<std::string> paths(known.begin(), known.end());
  for (const Target& target : manifest.targets) {
    paths.push_back(target.embed);
    paths.push_back(target.head);
    if (target.tied_weight) paths.push_back(*target.tied_weight);
    paths.insert(paths.end(), target.segments.begin(), target.segments.end());
  }
  for (const Variant& variant : manifest.variants) {
    if (variant.graph) paths.push_back(*variant.graph);
  }
  for (const std::string& path : paths) {
    const std::filesystem::path pure(path);
    const bool climbs = std::any_of(pure.begin(), pure.end(), [](const auto& part) { return part == ".."; });
    const bool odd = path.find('\\') != std::string::npos || path.find('\0') != std::string::npos;
    if (pure.is_absolute() || climbs || odd || known.count(path) == 0) {
      throw BundleError("'" + path.substr(0, 4 * kShown) + "' is outside the bundle or not among its files", "bundle.json");
    }
  }
}

// The positions that need a slot, as the file says them; they must follow from the schedule.
void CheckSlots(const Object& o, const Manifest& manifest) {
  const auto slots = o.Items<std::optional<int64_t>>("kv_slots", [](const Json& data, const std::string& where) {
    return data.is_null() ? std::nullopt : std::optional<int64_t>(Object::ToInteger(data, where));
  });
  bool follow = slots.size() == static_cast<size_t>(manifest.model.num_layers);
  for (size_t layer = 0; follow && layer < slots.size(); ++layer) {
    follow = slots[layer] == manifest.schedule.Cap(static_cast<int64_t>(layer));
  }
  if (!follow) throw Malformed("kv_slots", "do not follow from the schedule");
}

Manifest DecodeManifest(const Json& data) {
  const Object o(
      data, "",
      {"format_version", "model", "dtype", "limits", "schedule", "kv_slots", "segments", "variants", "targets", "files"});
  const Object limits(o.at("limits"), "limits", {"max_length", "max_batch"});
  Manifest manifest{
      DecodeModel(o.at("model")),
      o.Text("dtype"),
      {limits.Integer("max_length"), limits.Integer("max_batch")},
      DecodeSchedule(o.at("schedule")),
      o.Items<std::vector<int64_t>>(
          "segments",
          [](const Json& item, const std::string& where) { return Object::List<int64_t>(item, where, Object::ToInteger); }),
      o.Items<Variant>("variants", DecodeVariant),
      o.Items<Target>("targets", DecodeTarget),
      o.Items<File>("files", DecodeFile),
  };
  if (manifest.dtype != "float32" && manifest.dtype != "float16" && manifest.dtype != "bfloat16") {
    throw Malformed("dtype", "is none of float32, float16, bfloat16");
  }
  if (manifest.schedule.num_layers() != manifest.model.num_layers) {
    throw Malformed("schedule.num_layers", "differs from the model's " + std::to_string(manifest.model.num_layers) + " layers");
  }
  CheckStates(manifest.model);
  CheckSources(manifest);
  CheckSizes(manifest);
  CheckSegments(manifest);
  CheckSlots(o, manifest);
  CheckVariants(manifest);
  CheckTargets(manifest);
  CheckPaths(manifest);
  return manifest;
}

void CheckFile(const std::filesystem::path& bundle, const File& file) {
  const std::filesystem::path path = bundle / file.path;
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) throw BundleError("is missing", path.string());
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error || static_cast<int64_t>(size) != file.size) {
    throw BundleError("has " + std::to_string(size) + " bytes, not " + std::to_string(file.size), path.string());
  }
}

}  // namespace

StateLayers Model::Kept(int64_t layer) const {
  const auto has = [layer](const StateLayers& each) { return std::binary_search(each.layers.begin(), each.layers.end(), layer); };
  const auto group = std::find_if(state_layers.begin(), state_layers.end(), has);
  if (group != state_layers.end()) return *group;
  return {{layer}, Keys{num_kv_heads, head_size}, std::nullopt, {}};
}

void CheckIds(const Model& model, const int64_t* ids, size_t count, const std::string& where) {
  const auto outside = std::find_if(ids, ids + count, [&model](int64_t id) { return id < 0 || id >= model.vocab_size; });
  if (outside == ids + count) return;
  throw CapacityError("token id " + std::to_string(*outside) + " is outside the vocabulary",
                      "give ids from 0 to " + std::to_string(model.vocab_size - 1), where);
}

Manifest ParseManifest(const std::string& text) {
  const Json data = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (data.is_discarded()) throw BundleError("cannot be read (not JSON)", "bundle.json");
  const bool versioned = data.is_object() && data.contains("format_version");
  if (!versioned || data["format_version"] != kFormatVersion || !data["format_version"].is_number_integer()) {
    throw Error(SKD_ERROR_BUNDLE,
                "format_version is " + (versioned ? Shown(data["format_version"]) : "missing") + ", this runtime reads " +
                    std::to_string(kFormatVersion),
                "export the model with this version", "bundle.json");
  }
  try {
    return DecodeManifest(data);
  } catch (const Error& error) {
    if (error.code() == SKD_ERROR_BUNDLE) throw;
    throw BundleError(error.what(), "bundle.json");
  }
}

Manifest ReadManifest(const std::filesystem::path& bundle) {
  const std::filesystem::path path = bundle / "bundle.json";
  std::error_code error;
  std::ifstream file(path, std::ios::binary);
  if (!std::filesystem::is_regular_file(path, error) || !file) {
    throw Error(SKD_ERROR_BUNDLE, "there is no bundle.json here", "name the folder that skip-export wrote", bundle.string());
  }
  std::ostringstream text;
  text << file.rdbuf();
  Manifest manifest = ParseManifest(text.str());
  for (const File& each : manifest.files) CheckFile(bundle, each);
  return manifest;
}

}  // namespace skd
