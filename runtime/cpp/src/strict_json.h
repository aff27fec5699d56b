// Strict reading of bundle.json: a value of another type, an unknown or a missing key is an error that names its place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "error.h"

namespace skd {

using Json = nlohmann::json;

constexpr size_t kMaxShownBytes = 40;  // bytes of a wrong value that an error shows

// SKD_ERROR_BUNDLE for the place `where` in bundle.json; ParseManifest adds the file and what to do.
Error Malformed(const std::string& where, const std::string& what);

// A wrong value as an error shows it: short, and safe for values of any size and depth.
std::string Shown(const Json& data);

// A JSON object that must have exactly the given keys.
class Object {
 public:
  Object(const Json& data, std::string where, std::initializer_list<const char*> keys);

  const Json& at(const char* key) const { return data_.at(key); }
  std::string Where(const char* key) const { return where_.empty() ? key : where_ + "." + key; }
  int64_t Integer(const char* key) const { return ToInteger(at(key), Where(key)); }
  std::string Text(const char* key) const { return ToText(at(key), Where(key)); }
  std::optional<std::string> TextOrNull(const char* key) const {
    return at(key).is_null() ? std::nullopt : std::optional<std::string>(Text(key));
  }
  std::optional<int64_t> IntegerOrNull(const char* key) const {
    return at(key).is_null() ? std::nullopt : std::optional<int64_t>(Integer(key));
  }
  std::vector<int64_t> Integers(const char* key) const { return List<int64_t>(at(key), Where(key), ToInteger); }
  std::vector<std::string> Texts(const char* key) const { return List<std::string>(at(key), Where(key), ToText); }

  template <typename T, typename Decode>
  std::vector<T> Items(const char* key, Decode decode) const {
    return List<T>(at(key), Where(key), decode);
  }

  static int64_t ToInteger(const Json& data, const std::string& where);
  static std::string ToText(const Json& data, const std::string& where);

  template <typename T, typename Decode>
  static std::vector<T> List(const Json& data, const std::string& where, Decode decode) {
    if (!data.is_array()) throw Malformed(where, "is " + Shown(data) + ", not a list");
    std::vector<T> items;
    items.reserve(data.size());
    for (size_t i = 0; i < data.size(); ++i) items.push_back(decode(data[i], where + "[" + std::to_string(i) + "]"));
    return items;
  }

 private:
  const Json& data_;
  std::string where_;
};

}  // namespace skd
