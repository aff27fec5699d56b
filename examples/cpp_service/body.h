// A request's body, as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace service {

struct Limits;

// Parse a body. Throws HttpError 400, before any value is stored, if it is malformed, nests too deep, or has more values than
// any request within `limits`.
nlohmann::json ParseBody(const std::string& text, const Limits& limits);

}  // namespace service
