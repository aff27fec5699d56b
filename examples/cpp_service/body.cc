#include "body.h"

#include <cstddef>
#include <cstdint>

#include "completion.h"

namespace service {
namespace {

using Json = nlohmann::json;

constexpr char kNotJson[] = "the body is not valid JSON";
constexpr size_t kMaxLevels = 8;  // copying a value recurses once per level: 200 000 brackets would end the process
constexpr uint64_t kMaxValuesOutsidePrompt = 64;  // there are 20 fields, and `stop` has four texts

// The number of values in the largest request, whose prompts are all token ids.
uint64_t MaxValues(const Limits& limits) {
  return limits.max_prompts * (uint64_t{limits.max_prompt_tokens} + 1) + kMaxValuesOutsidePrompt;
}

// Counts values and stores none, because one byte of a body can become a value of 24 bytes. nlohmann-json's parser callback is
// no alternative: with it, an array of n objects takes n * n steps.
class ValueCounter : public nlohmann::json_sax<Json> {
 public:
  explicit ValueCounter(const Limits& limits) : limits_(limits), values_left_(MaxValues(limits)) {}

  bool null() override { return Count(); }
  bool boolean(bool /*value*/) override { return Count(); }
  bool number_integer(number_integer_t /*value*/) override { return Count(); }
  bool number_unsigned(number_unsigned_t /*value*/) override { return Count(); }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override { return Count(); }
  bool string(string_t& /*value*/) override { return Count(); }
  bool binary(binary_t& /*value*/) override { return Count(); }
  bool start_object(size_t /*size*/) override { return Begin(); }
  bool start_array(size_t /*size*/) override { return Begin(); }
  bool key(string_t& /*value*/) override { return true; }
  bool end_object() override { return End(); }
  bool end_array() override { return End(); }
  bool parse_error(size_t /*at*/, const std::string& /*token*/, const nlohmann::detail::exception& /*error*/) override {
    throw HttpError(400, kNotJson);
  }

 private:
  bool Count() {
    if (values_left_-- > 0) return true;
    throw HttpError(400, "the body has more than " + std::to_string(MaxValues(limits_)) + " values: this server takes " +
                             std::to_string(limits_.max_prompts) + " prompts of " + std::to_string(limits_.max_prompt_tokens) +
                             " tokens");
  }
  bool Begin() {
    if (++level_ > kMaxLevels) throw HttpError(400, "the body is nested too deeply");
    return Count();
  }
  bool End() {
    --level_;
    return true;
  }

  const Limits& limits_;
  uint64_t values_left_;
  size_t level_ = 0;
};

}  // namespace

Json ParseBody(const std::string& text, const Limits& limits) {
  if (text.find('\0') != std::string::npos) throw HttpError(400, kNotJson);  // where this parser would end, whatever follows
  ValueCounter counter(limits);
  Json::sax_parse(text, &counter);
  return Json::parse(text);
}

}  // namespace service
