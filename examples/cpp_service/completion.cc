#include "completion.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <utility>

#include "body.h"

namespace service {
namespace {

using Json = nlohmann::json;

[[noreturn]] void Refuse(const std::string& message) { throw HttpError(400, message); }

// A field that must pass `is`, or `otherwise` if it is missing or null.
template <typename T, typename Is>
T Field(const Json& body, const char* name, T otherwise, Is is, const char* wanted) {
  if (!body.contains(name) || body[name].is_null()) return otherwise;
  if (!is(body[name])) Refuse(std::string(name) + " is not " + wanted);
  return body[name].get<T>();
}

uint64_t Count(const Json& body, const char* name, uint64_t otherwise) {
  return Field<uint64_t>(
      body, name, otherwise, [](const Json& j) { return j.is_number_unsigned(); }, "a whole number, 0 or more");
}

// A negative seed means its two's complement: -1 is the same as 2**64-1, as in skip-run --seed.
uint64_t Seed(const Json& body, uint64_t otherwise) {
  return Field<uint64_t>(
      body, "seed", otherwise, [](const Json& j) { return j.is_number_integer(); }, "a whole number, -2**63 to 2**64-1");
}

double Number(const Json& body, const char* name, double otherwise) {
  return Field<double>(
      body, name, otherwise, [](const Json& j) { return j.is_number(); }, "a number");
}

bool Flag(const Json& body, const char* name) {
  return Field<bool>(
      body, name, false, [](const Json& j) { return j.is_boolean(); }, "true or false");
}

std::string Text(const Json& body, const char* name, const std::string& otherwise) {
  return Field<std::string>(
      body, name, otherwise, [](const Json& j) { return j.is_string(); }, "a string");
}

using NeutralFields = std::vector<std::pair<std::string, Json>>;

// Refuse the fields of an object that are neither served nor `neutral`: API fields that this server does not implement are
// accepted with the value that changes nothing. Messages put `prefix` before a field's name.
void CheckFields(const Json& object, const std::set<std::string>& served, const NeutralFields& neutral,
                 const std::string& prefix = "") {
  for (const auto& item : object.items()) {
    if (served.count(item.key()) > 0) continue;
    const auto known = std::find_if(neutral.begin(), neutral.end(), [&](const auto& each) { return each.first == item.key(); });
    if (known == neutral.end()) Refuse("unknown field '" + prefix + item.key().substr(0, 40) + "'");
    if (!item.value().is_null() && item.value() != known->second) {
      Refuse(prefix + item.key() + " is not supported by this server");
    }
  }
}

void CheckBodysFields(const Json& body) {
  static const std::set<std::string> served = {"model", "prompt", "max_tokens", "temperature",    "top_p", "top_k",
                                               "seed",  "stop",   "stream",     "stream_options", "user",  "ignore_eos"};
  static const NeutralFields neutral = {
      {"n", 1},       {"best_of", 1},          {"echo", false},          {"logprobs", nullptr},
      {"suffix", ""}, {"presence_penalty", 0}, {"frequency_penalty", 0}, {"logit_bias", Json::object()}};
  CheckFields(body, served, neutral);
}

void ReadStreamOptions(const Json& body, Completion* completion) {
  const Json options = Field<Json>(
      body, "stream_options", Json::object(), [](const Json& j) { return j.is_object(); }, "an object");
  CheckFields(options, {"include_usage", "continuous_usage_stats"}, {{"include_obfuscation", false}}, "stream_options.");
  completion->include_usage = Flag(options, "include_usage");
  completion->usage_in_each_piece = Flag(options, "continuous_usage_stats") && completion->include_usage;  // as in vLLM
}

bool IsTokenIds(const Json& value) {
  return value.is_array() && !value.empty() &&
         std::all_of(value.begin(), value.end(), [](const Json& id) { return id.is_number_integer(); });
}

void CheckLength(uint64_t length, uint64_t most, const std::string& unit) {
  if (length <= most) return;
  Refuse("prompt has " + std::to_string(length) + " " + unit + ", this server takes " + std::to_string(most));
}

std::vector<int64_t> Ids(const Json& prompt, const Limits& limits, skipdecode::Tokenizer* tokenizer) {
  if (IsTokenIds(prompt)) {
    CheckLength(prompt.size(), limits.max_prompt_tokens, "tokens");
    for (const Json& id : prompt) {  // checked as JSON numbers, because 2**63 does not fit int64
      if (!id.is_number_unsigned() || id.get<uint64_t>() >= limits.vocab_size)
        Refuse("token id " + id.dump() + " is outside the vocabulary");
    }
    return prompt.get<std::vector<int64_t>>();
  }
  if (!prompt.is_string()) Refuse("prompt is not a string, a list of token ids, or a list of these");
  const auto& text = prompt.get_ref<const std::string&>();
  if (text.find('\0') != std::string::npos) Refuse("prompt holds a NUL character");
  if (tokenizer == nullptr) Refuse("this model has no tokenizer: give token ids");
  CheckLength(text.size(), limits.max_prompt_bytes, "bytes");  // all requests share the one tokenizer
  std::vector<int64_t> ids = tokenizer->Encode(text);
  // tokens may have been added to a checkpoint's tokenizer but not to its weights
  const auto outside = [&](int64_t id) { return id < 0 || static_cast<uint64_t>(id) >= limits.vocab_size; };
  const auto found = std::find_if(ids.begin(), ids.end(), outside);
  if (found != ids.end()) Refuse("token id " + std::to_string(*found) + " of the prompt's text is outside the vocabulary");
  if (ids.empty()) Refuse("prompt is empty");
  CheckLength(ids.size(), limits.max_prompt_tokens, "tokens");
  return ids;
}

std::vector<std::vector<int64_t>> Prompts(const Json& body, const Limits& limits, skipdecode::Tokenizer* tokenizer) {
  if (!body.contains("prompt")) Refuse("prompt is missing");
  const Json& prompt = body["prompt"];
  const bool several = prompt.is_array() && !IsTokenIds(prompt);
  std::vector<std::vector<int64_t>> prompts;
  if (several && prompt.size() > limits.max_prompts)
    Refuse("at most " + std::to_string(limits.max_prompts) + " prompts per request");
  const size_t count = several ? prompt.size() : 1;
  if (count == 0) Refuse("prompt is empty");
  for (size_t i = 0; i < count; ++i) prompts.push_back(Ids(several ? prompt[i] : prompt, limits, tokenizer));
  return prompts;
}

skd_row_options Options(const Json& body, const Limits& limits) {
  skd_row_options options = skipdecode::RowOptions();
  const uint64_t max_tokens = Count(body, "max_tokens", std::min<uint64_t>(16, limits.max_new_tokens));
  if (max_tokens < 1 || max_tokens > limits.max_new_tokens) {
    Refuse("max_tokens is not in 1.." + std::to_string(limits.max_new_tokens));
  }
  options.max_new_tokens = static_cast<uint32_t>(max_tokens);
  options.temperature = Number(body, "temperature", 1.0);
  if (!(options.temperature >= 0 && options.temperature <= 2)) Refuse("temperature is not in 0..2");
  options.do_sample = options.temperature > 0 ? 1 : 0;
  options.top_p = Number(body, "top_p", 1.0);
  if (!(options.top_p > 0 && options.top_p <= 1)) Refuse("top_p is not in (0, 1]");
  options.top_k = static_cast<uint32_t>(std::min<uint64_t>(Count(body, "top_k", 0), UINT32_MAX));
  static std::atomic<uint64_t> unseeded{static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count())};
  options.seed = Seed(body, unseeded++);
  options.ignore_eos = Flag(body, "ignore_eos") ? 1 : 0;
  return options;
}

std::vector<std::string> Stops(const Json& body) {
  if (!body.contains("stop") || body["stop"].is_null()) return {};
  const Json list = body["stop"].is_string() ? Json::array({body["stop"]}) : body["stop"];
  if (!list.is_array() || list.size() > 4) Refuse("stop is not a string or a list of at most 4");
  std::vector<std::string> stops;
  for (const Json& each : list) {
    if (!each.is_string()) Refuse("stop holds something that is not a string");
    if (each.get_ref<const std::string&>().empty()) Refuse("stop holds an empty string");
    stops.push_back(each.get<std::string>());
  }
  return stops;
}

}  // namespace

std::string Dump(const Json& json) { return json.dump(-1, ' ', true, Json::error_handler_t::replace); }

std::string HttpError::Body() const {
  const Json error = {{"message", message_}, {"type", type_}, {"param", nullptr}, {"code", nullptr}};
  return Dump(Json{{"error", error}});
}

HttpError UnknownModel(const std::string& asked, const std::string& served) {
  return {404, "model '" + asked.substr(0, 80) + "' is not served here; choose " + served};
}

Completion ParseCompletion(const std::string& text, const std::string& model, const Limits& limits,
                           skipdecode::Tokenizer* tokenizer) {
  const Json body = ParseBody(text, limits);
  if (!body.is_object()) Refuse("the body is not a JSON object");
  CheckBodysFields(body);
  Text(body, "user", "");  // checked, then ignored
  const std::string requested_model = Text(body, "model", model);
  if (requested_model != model) throw UnknownModel(requested_model, model);
  static std::atomic<uint64_t> count{0};
  Completion completion{};
  completion.created =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  completion.id = "cmpl-" + std::to_string(completion.created) + "-" + std::to_string(count++);
  completion.model = model;
  completion.options = Options(body, limits);
  completion.stops = Stops(body);
  completion.gives_ids = tokenizer == nullptr;
  if (tokenizer == nullptr && !completion.stops.empty()) Refuse("stop needs a tokenizer, which this model lacks: leave it out");
  completion.stream = Flag(body, "stream");
  ReadStreamOptions(body, &completion);
  completion.prompts = Prompts(body, limits, tokenizer);
  return completion;
}

Json AnswerJson(const Completion& completion, const Choices& choices, std::optional<uint64_t> completion_tokens) {
  Json list = Json::array();
  for (const auto& [index, choice] : choices) {
    Json reason = choice.finish_reason ? Json(*choice.finish_reason) : Json(nullptr);
    list.push_back({{"index", index}, {"text", choice.text}, {"logprobs", nullptr}, {"finish_reason", std::move(reason)}});
    if (completion.gives_ids) list.back()["token_ids"] = choice.tokens;
  }
  Json answer = {{"id", completion.id},
                 {"object", "text_completion"},
                 {"created", completion.created},
                 {"model", completion.model},
                 {"choices", std::move(list)}};
  if (completion_tokens) {
    uint64_t prompt_tokens = 0;
    for (const auto& prompt : completion.prompts) prompt_tokens += prompt.size();
    answer["usage"] = {{"prompt_tokens", prompt_tokens},
                       {"completion_tokens", *completion_tokens},
                       {"total_tokens", prompt_tokens + *completion_tokens}};
  }
  return answer;
}

std::string StopFilter::Add(const std::string& text) {
  if (stopped_) return {};
  held_ += text;
  size_t end = std::string::npos;
  for (const std::string& stop : stops_) end = std::min(end, held_.find(stop));
  if (end != std::string::npos) {
    stopped_ = true;
    return held_.substr(0, end);
  }
  size_t keep = 0;  // length of the text's longest suffix that begins a stop string
  for (const std::string& stop : stops_) {
    for (size_t size = std::min(stop.size() - 1, held_.size()); size > keep; --size) {
      if (held_.compare(held_.size() - size, size, stop, 0, size) == 0) keep = size;
    }
  }
  std::string sendable = held_.substr(0, held_.size() - keep);
  held_.erase(0, sendable.size());
  return sendable;
}

std::string StopFilter::Rest() { return stopped_ ? std::string() : std::exchange(held_, {}); }

}  // namespace service
