// Bundles with a cpu and a cuda target, which SKD_TEST_DEVICE_BUNDLES names: the last one has an absolute anchor.
#pragma once

#include <catch2/catch.hpp>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

inline std::vector<std::string> DeviceBundles() {
  const char* paths = std::getenv("SKD_TEST_DEVICE_BUNDLES");
  REQUIRE(paths != nullptr);
  std::istringstream text(paths);
  return {std::istream_iterator<std::string>(text), std::istream_iterator<std::string>()};
}
