#include "strict_json.h"

#include <limits>
#include <set>

namespace skd {

Error Malformed(const std::string& where, const std::string& what) {
  return {SKD_ERROR_BUNDLE, where + " " + what, /*remedy=*/""};
}

std::string Shown(const Json& data) {
  if (data.is_object() || data.is_array()) return data.is_array() ? "a list" : "an object";
  return Shortened(data.dump(-1, ' ', true, Json::error_handler_t::replace), kMaxShownBytes);
}

Object::Object(const Json& data, std::string where, std::initializer_list<const char*> keys)
    : data_(data), where_(std::move(where)) {
  const std::string name = where_.empty() ? "the manifest" : where_;
  if (!data.is_object()) throw Malformed(name, "is " + Shown(data) + ", not an object");
  const std::set<std::string> known(keys.begin(), keys.end());
  for (const auto& item : data.items()) {
    if (known.count(item.key()) == 0) throw Malformed(name, "has unknown key '" + Shortened(item.key(), kMaxShownBytes) + "'");
  }
  for (const std::string& key : known) {
    if (!data.contains(key)) throw Malformed(name, "has missing key '" + key + "'");
  }
}

int64_t Object::ToInteger(const Json& data, const std::string& where) {
  const bool fits =
      data.is_number_integer() && !(data.is_number_unsigned() && data.get<uint64_t>() > std::numeric_limits<int64_t>::max());
  if (!fits) throw Malformed(where, "is " + Shown(data) + ", not a whole number below 2**63");
  return data.get<int64_t>();
}

std::string Object::ToText(const Json& data, const std::string& where) {
  if (!data.is_string()) throw Malformed(where, "is " + Shown(data) + ", not a string");
  return data.get<std::string>();
}

}  // namespace skd
