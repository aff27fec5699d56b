
#include "catch.h"
#include "error.h"
#include "schedule.h"

using skd::Anchor;
using skd::Schedule;

TEST_CASE("a layer is active on the prefix that ends at its cap") {
  const Schedule schedule(6, 1, {5, 5, 3, 2}, Anchor::kGenerated);
  for (int64_t layer = 0; layer < 6; ++layer) {
    for (int64_t t = 0; t < 8; ++t) {
      const auto active = skd::ActiveLayers(6, 1, schedule.LayersAt(t));
      const bool found = std::find(active.begin(), active.end(), layer) != active.end();
      const bool inside = !schedule.Cap(layer) || t < *schedule.Cap(layer);
      REQUIRE(found == inside);
    }
  }
}

TEST_CASE("early exit has no top") { REQUIRE(skd::ActiveLayers(6, 6, 2) == std::vector<int64_t>{0, 1}); }

TEST_CASE("counts that rise or leave their range are refused") {
  REQUIRE_THROWS_AS(Schedule(6, 1, {3, 4}, Anchor::kGenerated), skd::Error);
  REQUIRE_THROWS_AS(Schedule(6, 1, {7}, Anchor::kGenerated), skd::Error);
  REQUIRE_THROWS_AS(Schedule(6, 2, {2}, Anchor::kGenerated), skd::Error);
  REQUIRE_THROWS_AS(Schedule(6, 1, {}, Anchor::kGenerated), skd::Error);
  REQUIRE_THROWS_AS(Schedule(6, 7, {6}, Anchor::kGenerated), skd::Error);
}
