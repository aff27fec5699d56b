// Bundles that environment variables name, and prompts and options for their sessions.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <skipdecode/skipdecode.hpp>
#include <string>
#include <utility>
#include <vector>

#include "catch.h"

using Tokens = std::vector<int64_t>;

inline const skipdecode::Bundle& Bundle(const char* variable = "SKD_TEST_BUNDLE") {
  static std::map<std::string, skipdecode::Bundle> bundles;
  const char* path = std::getenv(variable);
  REQUIRE(path != nullptr);
  if (bundles.count(path) == 0) bundles.emplace(path, skipdecode::Bundle::Load(path));
  return bundles.at(path);
}

inline skd_row_options Options(uint32_t max_new_tokens, uint64_t seed = 0) {
  skd_row_options options = skipdecode::RowOptions();
  options.max_new_tokens = max_new_tokens;
  options.ignore_eos = 1;
  options.do_sample = seed > 0 ? 1 : 0;
  options.seed = seed;
  return options;
}

inline skd_session_options Room(uint32_t rows) {
  skd_session_options options = skipdecode::SessionOptions();
  options.max_rows = rows;
  return options;
}

inline Tokens TokensAlone(const skipdecode::Bundle& bundle, const Tokens& prompt, const skd_row_options& options) {
  Tokens tokens;
  skipdecode::Generate(bundle, {prompt}, options, [&](const skd_event& event) {
    tokens.push_back(event.token);
    return true;
  });
  return tokens;
}

// Returns how many events there are.
inline size_t AppendTokens(const std::vector<skd_event>& events, std::map<uint64_t, Tokens>* found) {
  for (const skd_event& event : events) (*found)[event.row].push_back(event.token);
  return events.size();
}

// A status's code and line; destroys the status.
inline std::pair<skd_code, std::string> CodeAndMessage(skd_status* status) {
  std::pair<skd_code, std::string> code_and_message(skd_status_code(status), skd_status_message(status));
  skd_status_destroy(status);
  return code_and_message;
}

inline const std::vector<Tokens> kPrompts = {{5, 6, 7, 8, 9, 10, 11}, {12, 3}, {40, 41, 42, 43}, {90}};
