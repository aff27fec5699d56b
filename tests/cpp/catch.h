// Catch2, version 2 (Debian 12) or 3 (Debian 13): the names of version 2.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>

namespace Catch {
using Matchers::EndsWith, Matchers::Equals, Matchers::StartsWith;
inline auto Contains(const std::string& part) { return Matchers::ContainsSubstring(part); }
}  // namespace Catch
#else
#include <catch2/catch.hpp>
#endif
