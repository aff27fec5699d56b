// Which requests the service accepts, its stop strings, and its metrics.
#include <cstdint>
#include <string>
#include <vector>

#include "catch.h"
#include "completion.h"
#include "metrics.h"

namespace {

std::string Filtered(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
  service::StopFilter filter(stops);
  std::string sent;
  for (const std::string& piece : pieces) sent += filter.Add(piece);
  return sent + filter.Rest();
}

// A body as parsed by a server that takes two prompts of three tokens.
service::Completion Parsed(const std::string& body) {
  return service::ParseCompletion(body, "m", {3, 8, 2, /*vocab_size=*/100, /*max_prompt_bytes=*/96}, nullptr);
}

std::string RefusalOf(const std::string& body) {
  try {
    Parsed(body);
  } catch (const service::HttpError& error) {
    CHECK(error.status() == 400);
    return error.what();
  }
  return "nothing";
}

// An array of `count` equal elements.
std::string Array(const std::string& each, size_t count) {
  std::string array = "[" + each;
  for (size_t i = 1; i < count; ++i) array += "," + each;
  return array + "]";
}

std::string Nested(size_t levels) { return std::string(levels, '[') + std::string(levels, ']'); }

}  // namespace

TEST_CASE("a body may nest eight levels deep") {
  CHECK(RefusalOf(R"({"user": )" + Nested(7) + "}") == "user is not a string");
  CHECK(RefusalOf(R"({"user": )" + Nested(8) + "}") == "the body is nested too deeply");
  CHECK(RefusalOf(R"({"user": {"a": {"a": )" + Nested(6) + "}}}") == "the body is nested too deeply");
  CHECK(RefusalOf(R"({"stop": [[]], "user": )" + Array(Nested(3), 20) + "}") == "user is not a string");
}

TEST_CASE("a body has no more values than the largest request") {
  const std::string largest = Array("[1,2,3]", 2),
                    says = "the body has more than 72 values: this server takes 2 prompts of 3 tokens";
  CHECK(Parsed(R"({"prompt": )" + largest + "}").prompts.size() == 2);
  CHECK(RefusalOf(R"({"prompt": )" + Array("1", 70) + "}") == "prompt has 70 tokens, this server takes 3");
  CHECK(RefusalOf(R"({"prompt": )" + Array("1", 71) + "}") == says);
  for (const char* each : {"1", "-1", "1.5", "null", "true", "\"\"", "{}", "[]", R"({"a":1})"}) {
    CHECK(RefusalOf(R"({"prompt": )" + Array(each, 100) + "}") == says);
  }
}

TEST_CASE("an error's line is reported in full, even if the client sent a NUL") {
  const std::string body = service::HttpError(404, std::string("model 'a\0b' is not here", 23)).Body();
  CHECK_THAT(body, Catch::Contains(R"("model 'a\u0000b' is not here")"));
}

TEST_CASE("a body is not read beyond the number of values it may have") {
  CHECK(RefusalOf(R"({"prompt": )" + Array("{}", 100) + ", this is no JSON") ==
        "the body has more than 72 values: this server takes 2 prompts of 3 tokens");
}

TEST_CASE("a seed is any whole number of 64 bits, as two's complement") {
  const auto seed = [](const std::string& text) { return Parsed(R"({"prompt": [1], "seed": )" + text + "}").options.seed; };
  CHECK(seed("0") == 0);
  CHECK(seed("-1") == UINT64_MAX);
  CHECK(seed("18446744073709551615") == UINT64_MAX);
  CHECK(seed("-9223372036854775808") == uint64_t{1} << 63);
  for (const char* none : {"-9223372036854775809", "18446744073709551616", "1.0", "true", "\"1\"", "[]"}) {
    CHECK(RefusalOf(std::string(R"({"prompt": [1], "seed": )") + none + "}") == "seed is not a whole number, -2**63 to 2**64-1");
  }
}

TEST_CASE("the stop string that comes first in the text ends it, not the one listed first") {
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

TEST_CASE("a possible beginning of a stop string is given out when the text ends") {
  CHECK(Filtered({"stop"}, {"a s", "to"}) == "a sto");
  CHECK(Filtered({"stop"}, {"a sto", "p", " b"}) == "a ");
}

TEST_CASE("first tokens are counted in every bucket they fit in, and their seconds are summed") {
  service::Metrics metrics;
  for (const double seconds : {0.02, 0.02, 2.0, 100.0}) metrics.CountFirstToken(seconds);
  const std::string page = metrics.Text(), bucket = "first_token_seconds_bucket{le=";
  for (const char* line : {"\"0.01\"} 0\n", "\"0.03\"} 2\n", "\"1\"} 2\n", "\"3\"} 3\n", "\"30\"} 3\n", "\"+Inf\"} 4\n"}) {
    CHECK_THAT(page, Catch::Contains(bucket + line));
  }
  CHECK_THAT(page, Catch::Contains("first_token_seconds_count 4\n") && Catch::Contains("first_token_seconds_sum 102.04\n"));
}

TEST_CASE("sums of seconds are reported to the microsecond") {
  service::Metrics metrics;
  metrics.first_token_sum_us = 1'234'567'890'123;
  CHECK_THAT(metrics.Text(), Catch::Contains("first_token_seconds_sum 1234567.890123\n"));
  CHECK_THAT(metrics.Text(), Catch::Contains("{le=\"0.01\"}") && Catch::Contains("{le=\"0.3\"}"));
}

TEST_CASE("a text with ids that the model has no weights for is the client's mistake") {
  const auto bundle = skipdecode::Bundle::Load("");
  skipdecode::Tokenizer tokenizer(bundle);
  const service::Limits limits{8, 8, 8, /*vocab_size=*/100, /*max_prompt_bytes=*/8};
  CHECK(service::ParseCompletion(R"({"prompt": "ABc"})", "m", limits, &tokenizer).prompts.front().back() == 'c');
  CHECK_THROWS_WITH(service::ParseCompletion(R"({"prompt": "ABd"})", "m", limits, &tokenizer),
                    "token id 100 of the prompt's text is outside the vocabulary");
}

TEST_CASE("a text of more bytes than the server takes is refused before it is tokenised") {
  const auto bundle = skipdecode::Bundle::Load("");
  skipdecode::Tokenizer tokenizer(bundle);
  const service::Limits limits{8, 8, 8, /*vocab_size=*/100, /*max_prompt_bytes=*/3};
  CHECK(service::ParseCompletion(R"({"prompt": "ABc"})", "m", limits, &tokenizer).prompts.size() == 1);
  CHECK_THROWS_WITH(service::ParseCompletion(R"({"prompt": "ABcd"})", "m", limits, &tokenizer),  // its d would be refused
                    "prompt has 4 bytes, this server takes 3");
}
