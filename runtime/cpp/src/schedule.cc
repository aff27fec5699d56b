#include "schedule.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "error.h"

namespace skd {

Schedule::Schedule(int64_t num_layers, int64_t warmup_layers, std::vector<int64_t> layers, Anchor anchor)
    : num_layers_(num_layers), warmup_layers_(warmup_layers), layers_(std::move(layers)), anchor_(anchor) {
  const auto fail = [](const std::string& what) { throw Error(SKD_ERROR_SCHEDULE, what, "choose other layer counts"); };
  if (warmup_layers_ < 0 || warmup_layers_ > num_layers_) {
    fail("warmup_layers " + std::to_string(warmup_layers_) + ": the model has " + std::to_string(num_layers_) + " layers");
  }
  if (layers_.empty()) fail("the table of layer counts is empty");
  const int64_t least = warmup_layers_ == num_layers_ ? 1 : warmup_layers_ + 1;
  for (size_t t = 0; t < layers_.size(); ++t) {
    if (layers_[t] < least || layers_[t] > num_layers_) {
      fail(std::to_string(layers_[t]) + " layers at position " + std::to_string(t) + ": not among " + std::to_string(least) +
           " .. " + std::to_string(num_layers_));
    }
    if (t > 0 && layers_[t] > layers_[t - 1]) fail("the layer count rises at position " + std::to_string(t));
  }
}

Schedule Schedule::FullDepth(int64_t num_layers) { return {num_layers, 0, {num_layers}, Anchor::kGenerated}; }

double Schedule::mean_layers() const {
  return std::accumulate(layers_.begin(), layers_.end(), 0.0) / static_cast<double>(layers_.size());
}

int64_t Schedule::LayersAt(int64_t position) const {
  return layers_[std::min(static_cast<size_t>(position), layers_.size() - 1)];
}

int64_t Schedule::LeastCount(int64_t layer) const {
  return layer < warmup_layers_ ? layer + 1 : num_layers_ - layer + warmup_layers_;
}

std::optional<int64_t> Schedule::Cap(int64_t layer) const {
  const int64_t needed = LeastCount(layer);
  if (layers_.back() >= needed) return std::nullopt;
  const auto first = std::partition_point(layers_.begin(), layers_.end(), [needed](int64_t count) { return count >= needed; });
  return first - layers_.begin();
}

std::vector<int64_t> ActiveLayers(int64_t num_layers, int64_t warmup_layers, int64_t count) {
  const int64_t first = std::min(warmup_layers, count);
  std::vector<int64_t> active(static_cast<size_t>(count));
  std::iota(active.begin(), active.begin() + first, 0);
  std::iota(active.begin() + first, active.end(), num_layers - (count - first));
  return active;
}

}  // namespace skd
