// bundle.json, read as strictly as runtime/manifest.py reads it. The format: docs/bundle.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "schedule.h"

namespace skd {

// An array whose size does not depend on a row's length, zero before the row's first token.
struct State {
  std::string name;            // its engine reads past_{name}.{l} and writes present_{name}.{l}
  std::vector<int64_t> shape;  // of one row
};

// Sizes of a layer's keys, and of its values.
struct KeyValueSizes {
  int64_t num_heads, head_size;
};

// Layers that keep the same of a row: keys and values, or those of another layer, and states of linear attention and the
// like.
struct LayerGroup {
  std::vector<int64_t> layers;        // rising
  std::optional<KeyValueSizes> keys;  // nullopt: they have none of their own
  std::optional<int64_t> keys_of;     // a layer below, computed at every position, whose keys and values they read
  std::vector<State> states;
};

struct Model {
  std::string name, model_type;
  int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_size, vocab_size, num_parameters;
  std::vector<LayerGroup> state_layers;  // any other layer keeps keys and values of the sizes above, and nothing else
  std::vector<int64_t> eos_token_ids;

  // What `layer` keeps.
  LayerGroup GroupOf(int64_t layer) const;
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

// `where` names the file in errors. Throws SKD_ERROR_BUNDLE if `text` is not JSON or has another format version, unknown or
// missing keys, or parts that contradict each other.
Manifest ParseManifest(const std::string& text, const std::string& where = "bundle.json");

// Read and check bundle.json in the folder `bundle`, and check that every file is there and has its size.
Manifest ReadManifest(const std::filesystem::path& bundle);

}  // namespace skd
