// The service's stop strings and metrics.
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "completion.h"
#include "metrics.h"

namespace {

std::string Filtered(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
  service::StopFilter filter(stops);
  std::string told;
  for (const std::string& piece : pieces) told += filter.Add(piece);
  return told + filter.Rest();
}

}  // namespace

TEST_CASE("the stop string that comes first in the text ends it, not the one that is named first") {
  CHECK(Filtered({"cd", "b"}, {"abcd"}) == "a");
  CHECK(Filtered({"b", "cd"}, {"abcd"}) == "a");
}

TEST_CASE("of several stop strings that may have begun, the longest beginning is held back") {
  for (const auto& stops : {std::vector<std::string>{"xyz", "yq"}, std::vector<std::string>{"yq", "xyz"}}) {
    CHECK(Filtered(stops, {"axy", "z!"}) == "a");
    CHECK(Filtered(stops, {"axy", "q!"}) == "ax");
    service::StopFilter filter(stops);
    CHECK(filter.Add("axy") == "a");
    CHECK(filter.Add("!") == "xy!");
  }
}

TEST_CASE("what might have become a stop string is told where the text ends") {
  CHECK(Filtered({"stop"}, {"a s", "to"}) == "a sto");
  CHECK(Filtered({"stop"}, {"a sto", "p", " b"}) == "a ");
}

TEST_CASE("first tokens are counted in each bucket that they are within, and their seconds are summed") {
  service::Metrics metrics;
  for (const double seconds : {0.02, 0.02, 2.0, 100.0}) metrics.FirstToken(seconds);
  const std::string page = metrics.Text(), bucket = "first_token_seconds_bucket{le=";
  for (const char* line : {"\"0.01\"} 0\n", "\"0.03\"} 2\n", "\"1\"} 2\n", "\"3\"} 3\n", "\"30\"} 3\n", "\"+Inf\"} 4\n"}) {
    CHECK_THAT(page, Catch::Contains(bucket + line));
  }
  CHECK_THAT(page, Catch::Contains("first_token_seconds_count 4\n") && Catch::Contains("first_token_seconds_sum 102.04\n"));
}
