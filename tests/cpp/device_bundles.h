// Prompts, and the bundles that SKD_TEST_DEVICE_BUNDLES names, with a cpu and a cuda target. The last has an absolute anchor.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "catch.h"

using Tokens = std::vector<int64_t>;

inline const Tokens kPrompts[] = {{9, 8, 7, 6, 5, 4, 3}, {5, 6}, {40, 41, 42, 43}, {90}};

inline std::vector<std::string> DeviceBundles() {
  const char* paths = std::getenv("SKD_TEST_DEVICE_BUNDLES");
  REQUIRE(paths != nullptr);
  std::istringstream text(paths);
  return {std::istream_iterator<std::string>(text), std::istream_iterator<std::string>()};
}
