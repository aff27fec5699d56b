// A request's body, as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace service {

struct Limits;

// Throws HttpError 400, before anything of it is kept, for a body that is malformed, nests too deep or has more values than any
// request within `limits`.
nlohmann::json ParseBody(const std::string& text, const Limits& limits);

}  // namespace service
