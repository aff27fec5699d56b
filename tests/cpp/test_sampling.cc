// Tokens that the host chooses, compared with those chosen from a sorted vocabulary.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "catch.h"
#include "error.h"
#include "sampling.h"

namespace {

using Logits = std::vector<float>;

skd_row_options Options(double temperature, uint32_t top_k, double top_p) {
  skd_row_options options = skd_row_options_default();
  options.do_sample = 1;
  options.temperature = temperature;
  options.top_k = top_k;
  options.top_p = top_p;
  return options;
}

// The tokens that may be chosen, likeliest first, and the running mass at each.
struct Kept {
  std::vector<int64_t> ids;
  std::vector<double> cumulative_mass;
};

Kept KeepLikeliest(const Logits& logits, const skd_row_options& options) {
  std::vector<int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto logit = [&logits](int64_t id) { return logits[static_cast<size_t>(id)]; };
  std::stable_sort(order.begin(), order.end(), [&logit](int64_t a, int64_t b) { return logit(a) > logit(b); });
  if (options.top_k > 0) order.resize(std::min<size_t>(options.top_k, order.size()));
  std::vector<double> mass;
  for (const int64_t id : order) mass.push_back(std::exp((double{logit(id)} - double{logit(order[0])}) / options.temperature));
  const double total = std::accumulate(mass.begin(), mass.end(), 0.0);
  Kept kept;
  for (double running = 0; kept.ids.size() < order.size() && running < options.top_p * total;) {
    running += mass[kept.ids.size()];
    kept.ids.push_back(order[kept.ids.size()]);
    kept.cumulative_mass.push_back(running);
  }
  return kept;
}

int64_t TokenAt(const Kept& kept, double draw) {
  const auto found =
      std::upper_bound(kept.cumulative_mass.begin(), kept.cumulative_mass.end(), draw * kept.cumulative_mass.back());
  return kept.ids[static_cast<size_t>(std::min(found, kept.cumulative_mass.end() - 1) - kept.cumulative_mass.begin())];
}

// Logits: peaked, flat, all within one bin, with many equal ones, masked.
std::vector<Logits> Examples(size_t count) {
  std::mt19937 generator(static_cast<uint32_t>(count));
  std::normal_distribution<float> normal;
  std::vector<Logits> examples(5, Logits(count));
  for (size_t id = 0; id < count; ++id) {
    const float drawn = normal(generator);
    examples[0][id] = 5 * drawn;
    examples[1][id] = 0.5F * drawn;
    examples[2][id] = 0.001F * drawn;
    examples[3][id] = std::round(drawn);
    examples[4][id] = id % 3 == 0 ? drawn : -std::numeric_limits<float>::infinity();
  }
  return examples;
}

}  // namespace

TEST_CASE("the token is the same as from a sorted vocabulary, for peaked and flat logits") {
  for (const size_t count : {size_t{1}, size_t{99}, size_t{6000}}) {
    const std::vector<Logits> examples = Examples(count);
    for (const skd_row_options& options :
         {Options(1, 0, 1), Options(1e-320, 0, 0.9), Options(0.01, 0, 1), Options(1, 0, 0.9), Options(30, 0, 0.999),
          Options(1, 40, 1), Options(1, 40, 0.8), Options(1, 4000, 0.99), Options(1, 100000, 0.5), Options(1, 0, 1e-9)}) {
      skd::Sampler sampler;
      sampler.Prepare(static_cast<int64_t>(count), options);
      for (size_t example = 0; example < examples.size(); ++example) {
        const Kept kept = KeepLikeliest(examples[example], options);
        for (uint64_t step = 0; step < 20; ++step) {
          INFO(count << " tokens, example " << example << ", step " << step << ", temperature " << options.temperature
                     << ", top_k " << options.top_k << ", top_p " << options.top_p);
          const double draw = skd::Uniform(5, 0, step);
          REQUIRE(sampler.Choose(examples[example].data(), static_cast<int64_t>(count), options, draw) == TokenAt(kept, draw));
        }
      }
    }
  }
}

TEST_CASE("from NaN logits some token is chosen, and an infinite logit wins") {
  for (const float broken : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const bool all : {false, true}) {
      Logits logits(50, all ? broken : 0.5F);
      logits[7] = broken;
      for (const skd_row_options& options :
           {Options(1, 0, 1), Options(1, 0, 0.9), Options(1, 5, 1), Options(1, 49, 1), Options(1e-320, 0, 1)}) {
        skd::Sampler sampler;
        sampler.Prepare(50, options);
        const int64_t found = sampler.Choose(logits.data(), 50, options, 0.6);
        CHECK((found >= 0 && found < 50));
        CHECK((found == 7 || all || std::isnan(broken)));
      }
    }
  }
}

TEST_CASE("a draw close to 1 takes a kept token, never one of probability 0") {
  const std::vector<Logits> examples = Examples(6000);
  for (const double top_p : {1.0, 1 - 1e-15, 0.9, 0.5}) {
    for (size_t example = 0; example < examples.size(); ++example) {
      INFO("top_p " << top_p << ", example " << example);
      const skd_row_options options = Options(1, 0, top_p);
      skd::Sampler sampler;
      sampler.Prepare(6000, options);
      const int64_t found = sampler.Choose(examples[example].data(), 6000, options, 0x1.fffffffffffffp-1);
      const Kept kept = KeepLikeliest(examples[example], options);
      CHECK((std::find(kept.ids.begin(), kept.ids.end(), found) != kept.ids.end()));
      CHECK(examples[example][static_cast<size_t>(found)] > -std::numeric_limits<float>::infinity());
    }
  }
}

TEST_CASE("settings that are NaN or out of range are refused, but not read without sampling") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (skd_row_options options : {Options(nan, 0, 1), Options(0, 0, 1), Options(-1, 0, 1), Options(1, 0, nan), Options(1, 0, 0),
                                  Options(1, 0, -0.5), Options(1, 0, std::nextafter(1.0, 2.0))}) {
    INFO("temperature " << options.temperature << ", top_p " << options.top_p);
    CHECK_THROWS_AS(skd::CheckSampling(options), skd::Error);
    options.do_sample = 0;
    CHECK_NOTHROW(skd::CheckSampling(options));
  }
}
