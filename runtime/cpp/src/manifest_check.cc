#include "manifest_check.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "strict_json.h"

namespace skd {
namespace {

// Whether the arrays that the layers of `group` keep have valid sizes and names that differ.
bool HasValidArrays(const LayerGroup& group) {
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
  for (const LayerGroup& group : model.state_layers) {
    const auto& layers = group.layers;
    const bool holds = std::is_sorted(layers.begin(), layers.end()) && std::all_of(layers.begin(), layers.end(), among_layers);
    if (!holds || !HasValidArrays(group)) {
      throw Malformed("model.state_layers", "have layers out of range or twice, or parts without a size");
    }
  }
}

// A layer whose keys others read must be below them, have keys of its own, and be computed at every position.
void CheckSources(const Manifest& manifest) {
  for (const LayerGroup& group : manifest.model.state_layers) {
    if (!group.keys_of) continue;
    const int64_t source = *group.keys_of;
    const bool below = source >= 0 && !group.layers.empty() && source < group.layers.front();
    if (group.keys || !below || !manifest.model.GroupOf(source).keys) {
      throw Malformed("model.state_layers", "read keys of layers that have none, or are above");
    }
  }
  if (SkipsSource(manifest.schedule, manifest.model)) {
    throw Malformed("the schedule", "skips layers whose keys and values later layers read");
  }
}

// How many numbers are kept of a row, with keys and values of `length` positions in each layer. In double, which no size
// overflows.
double StateNumbers(const Model& model, int64_t length) {
  const auto product = [](const std::vector<int64_t>& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), 1.0, std::multiplies<>());
  };
  double numbers = product({2, model.num_layers, model.num_kv_heads, model.head_size, length});
  for (const LayerGroup& group : model.state_layers) {
    const auto layers = static_cast<int64_t>(group.layers.size());
    if (group.keys) numbers += product({2, layers, group.keys->num_heads, group.keys->head_size, length});
    for (const State& state : group.states) numbers += static_cast<double>(layers) * product(state.shape);
  }
  return numbers;
}

// Whether all layers keep states instead of keys, so that the model has no attention heads.
bool WithoutHeads(const Model& m) {
  int64_t without = 0;
  for (const LayerGroup& group : m.state_layers) without += group.keys ? 0 : static_cast<int64_t>(group.layers.size());
  return m.num_heads == 0 && m.num_kv_heads == 0 && m.head_size == 0 && without == m.num_layers;
}

void CheckSizes(const Manifest& manifest) {
  const Model& m = manifest.model;
  std::vector<int64_t> sizes{m.num_layers, m.hidden_size, m.vocab_size, m.num_parameters};
  if (!WithoutHeads(m)) sizes.insert(sizes.end(), {m.num_heads, m.num_kv_heads, m.head_size});
  for (const int64_t size : sizes) {
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
  if (CutsThroughSegment(manifest.schedule, manifest.segments)) throw Malformed("segments", "are cut through by the schedule");
}

void CheckVariants(const Manifest& manifest) {
  const Schedule& schedule = manifest.schedule;
  std::set<int64_t> seen;
  std::set<int64_t> wanted(schedule.layers().begin(), schedule.layers().end());
  wanted.insert(manifest.model.num_layers);
  for (const Variant& variant : manifest.variants) {
    const std::string wrong = variant.name + " does not climb its layers";
    if (!seen.insert(variant.num_layers).second) throw Malformed("variants:", variant.name + " is listed twice");
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
  if (!wanted.empty()) throw Malformed("variants", "lack one of the schedule's");
}

void CheckTargets(const Manifest& manifest) {
  static const std::set<std::string> known_weights{"fp32", "fp16", "bf16", "int8", "int4"};
  for (const Target& target : manifest.targets) {
    if (known_weights.count(target.weights) == 0) {
      throw Malformed("targets", "have weights that are none of fp32, fp16, bf16, int8, int4");
    }
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
  for (const File& file : manifest.files) {
    if (!known.insert(file.path).second) throw Malformed("files:", "one is listed twice");
  }
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
      throw Malformed("'" + Shortened(path, 4 * kMaxShownBytes) + "'", "is outside the bundle or not among its files");
    }
  }
}

// How many of the schedule's positions compute each layer, as the file states it, must follow from the schedule.
void CheckSlots(const Manifest& manifest, const std::vector<std::optional<int64_t>>& slots) {
  bool follow = slots.size() == static_cast<size_t>(manifest.model.num_layers);
  for (size_t layer = 0; follow && layer < slots.size(); ++layer) {
    follow = slots[layer] == manifest.schedule.Cap(static_cast<int64_t>(layer));
  }
  if (!follow) throw Malformed("kv_slots", "do not follow from the schedule");
}

}  // namespace

void CheckManifest(const Manifest& manifest, const std::vector<std::optional<int64_t>>& kv_slots) {
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
  CheckSlots(manifest, kv_slots);
  CheckVariants(manifest);
  CheckTargets(manifest);
  CheckPaths(manifest);
}

bool CutsThroughSegment(const Schedule& schedule, const std::vector<std::vector<int64_t>>& segments) {
  return std::any_of(segments.begin(), segments.end(), [&](const auto& segment) {
    const auto differs = [&](int64_t layer) { return schedule.Cap(layer) != schedule.Cap(segment.front()); };
    return std::any_of(segment.begin(), segment.end(), differs);
  });
}

bool SkipsSource(const Schedule& schedule, const Model& model) {
  const auto skips = [&](const LayerGroup& group) { return group.keys_of && schedule.Cap(*group.keys_of); };
  return std::any_of(model.state_layers.begin(), model.state_layers.end(), skips);
}

}  // namespace skd
