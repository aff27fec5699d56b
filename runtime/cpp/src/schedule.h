// The schedule: how many layers each position computes (SkipDecode, arXiv 2307.02628, section 3). As in runtime/schedule.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace skd {

enum class Anchor {
  kGenerated,  // t = 0 at the first decode step; the prompt runs at full depth
  kAbsolute,   // t = 0 at the first prompt token
};

// t -> k(t), never increasing, so active layers are nested.
class Schedule {
 public:
  // Throws SKD_ERROR_SCHEDULE if the counts rise or a number is out of range.
  Schedule(int64_t num_layers, int64_t warmup_layers, std::vector<int64_t> layers, Anchor anchor);
  static Schedule FullDepth(int64_t num_layers);

  int64_t num_layers() const { return num_layers_; }
  int64_t warmup_layers() const { return warmup_layers_; }
  Anchor anchor() const { return anchor_; }
  const std::vector<int64_t>& layers() const { return layers_; }
  double mean_layers() const;
  // k(t), t >= 0.
  int64_t LayersAt(int64_t position) const;
  // The least layer count at which `layer` is active.
  int64_t LeastCount(int64_t layer) const;
  // How many positions, counted from the first, compute `layer`; nullopt: all.
  std::optional<int64_t> Cap(int64_t layer) const;

 private:
  int64_t num_layers_;
  int64_t warmup_layers_;
  std::vector<int64_t> layers_;
  Anchor anchor_;
};

// The `count` active layers of `num_layers`, ascending: the first `warmup_layers` (at most `count`) and the last ones.
std::vector<int64_t> ActiveLayers(int64_t num_layers, int64_t warmup_layers, int64_t count);

}  // namespace skd
