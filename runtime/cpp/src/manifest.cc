#include "manifest.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "error.h"
#include "manifest_check.h"
#include "strict_json.h"

namespace skd {
namespace {

constexpr int64_t kFormatVersion = 4;

State DecodeState(const Json& data, const std::string& where) {
  const Object o(data, where, {"name", "shape"});
  return {o.Text("name"), o.Integers("shape")};
}

std::optional<KeyValueSizes> DecodeKeys(const Json& data, const std::string& where) {
  if (data.is_null()) return std::nullopt;
  const Object o(data, where, {"num_heads", "head_size"});
  return KeyValueSizes{o.Integer("num_heads"), o.Integer("head_size")};
}

LayerGroup DecodeLayerGroup(const Json& data, const std::string& where) {
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
          o.Items<LayerGroup>("state_layers", DecodeLayerGroup),
          o.Integers("eos_token_ids")};
}

Schedule DecodeSchedule(const Json& data) {
  const Object o(data, "schedule", {"name", "num_layers", "warmup_layers", "layers", "anchor"});
  o.Text("name");  // how the schedule was made, for people
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

std::optional<int64_t> DecodeSlots(const Json& data, const std::string& where) {
  return data.is_null() ? std::nullopt : std::optional<int64_t>(Object::ToInteger(data, where));
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
  CheckManifest(manifest, o.Items<std::optional<int64_t>>("kv_slots", DecodeSlots));
  return manifest;
}

Error Unreadable(const std::filesystem::path& path, const std::string& reason) {
  return {SKD_ERROR_BUNDLE, "cannot be read (" + reason + ")", "check its name and permissions", path.string()};
}

// Throws if that cannot be found out.
bool IsFile(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::none) throw Unreadable(path, error.message());
  return std::filesystem::is_regular_file(status);
}

void CheckFile(const std::filesystem::path& bundle, const File& file) {
  const std::filesystem::path path = bundle / file.path;
  if (!IsFile(path)) throw BundleError("is missing", path.string());
  if (access(path.c_str(), R_OK) != 0) throw Unreadable(path, std::generic_category().message(errno));
  std::error_code error;
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error || static_cast<int64_t>(size) != file.size) {
    throw BundleError("has " + std::to_string(size) + " bytes, not " + std::to_string(file.size), path.string());
  }
}

}  // namespace

LayerGroup Model::GroupOf(int64_t layer) const {
  const auto has = [layer](const LayerGroup& each) { return std::binary_search(each.layers.begin(), each.layers.end(), layer); };
  const auto group = std::find_if(state_layers.begin(), state_layers.end(), has);
  if (group != state_layers.end()) return *group;
  return {{layer}, KeyValueSizes{num_kv_heads, head_size}, std::nullopt, {}};
}

Manifest ParseManifest(const std::string& text, const std::string& where) {
  const Json data = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  // neither a byte order mark nor NUL is JSON, but this parser skips the one, and whatever follows the other
  const bool has_mark_or_nul = text.rfind("\xEF\xBB\xBF", 0) == 0 || text.find('\0') != std::string::npos;
  if (data.is_discarded() || has_mark_or_nul) throw BundleError("cannot be read (not JSON)", where);
  const bool has_version = data.is_object() && data.contains("format_version");
  if (!has_version || data["format_version"] != kFormatVersion || !data["format_version"].is_number_integer()) {
    throw Error(SKD_ERROR_BUNDLE,
                "format_version is " + (has_version ? Shown(data["format_version"]) : "missing") + ", this runtime reads " +
                    std::to_string(kFormatVersion),
                "export the model with this version", where);
  }
  try {
    return DecodeManifest(data);
  } catch (const Error& error) {
    throw BundleError(error.what(), where);
  }
}

Manifest ReadManifest(const std::filesystem::path& bundle) {
  const std::filesystem::path path = bundle / "bundle.json";
  if (!IsFile(path)) {
    throw Error(SKD_ERROR_BUNDLE, "there is no bundle.json here", "name the folder that skip-export wrote", bundle.string());
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Unreadable(path, std::generic_category().message(errno));
  std::ostringstream text;
  text << file.rdbuf();
  Manifest manifest = ParseManifest(text.str(), path.string());
  for (const File& each : manifest.files) CheckFile(bundle, each);
  return manifest;
}

}  // namespace skd
