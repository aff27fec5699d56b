// bundle.json, read as strictly as runtime/manifest.py reads it. The format: docs/bundle.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "schedule.h"

namespace skd {

// An array that has one size whatever the length, zeros before a row's first token.
struct State {
  std::string name;            // its engine reads past_{name}.{l} and writes present_{name}.{l}
  std::vector<int64_t> shape;  // of one row
};

// Sizes of a layer's keys, and of its values.
struct Keys {
  int64_t num_heads, head_size;
};

// Layers that keep the same: keys and values, or those of another layer, and the states of linear attention and its like.
struct StateLayers {
  std::vector<int64_t> layers;     // rising
  std::optional<Keys> keys;        // none: they have none of their own
  std::optional<int64_t> keys_of;  // a layer below, computed at every position, whose keys and values they read
  std::vector<State> states;
};

struct Model {
  std::string name, model_type;
  int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_size, vocab_size, num_parameters;
  std::vector<StateLayers> state_layers;  // every other layer has keys and values of those sizes, and nothing else
  std::vector<int64_t> eos_token_ids;

  // What `layer` keeps.
  StateLayers Kept(int64_t layer) const;
};

struct Limits {
  int64_t max_length;  // tokens of a row, prompt and generated
  int64_t max_batch;   // rows
};

struct Variant {
  std::string name;
  int64_t num_layers;
  std::vector<int64_t> segments;
  std::optional<std::string> graph;
};

struct Target {
  std::string name, weights, library, library_version, machine;
  std::vector<std::string> cpu_features;
  std::string embed;
  std::vector<std::string> segments;
  std::string head;
  std::optional<std::string> tied_weight;
  std::vector<int64_t> segment_weight_bytes;
  int64_t head_weight_bytes;
};

struct File {
  std::string path;
  int64_t size;
  std::string sha256;
};

struct Manifest {
  Model model;
  std::string dtype;
  Limits limits;
  Schedule schedule;
  std::vector<std::vector<int64_t>> segments;  // layers of each
  std::vector<Variant> variants;
  std::vector<Target> targets;
  std::vector<File> files;
};

// `where` names the file in errors. Throws SKD_ERROR_BUNDLE: not JSON, another format version, unknown or missing keys, parts
// that contradict each other.
Manifest ParseManifest(const std::string& text, const std::string& where = "bundle.json");

// Also that every file is there in its size.
Manifest ReadManifest(const std::filesystem::path& bundle);

}  // namespace skd
