// One request of the OpenAI completions API: what it asks for, and the JSON that answers it.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <skipdecode/skipdecode.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace service {

// Serialise JSON as in every answer: ASCII only, with U+FFFD for bytes that are not UTF-8.
std::string Dump(const nlohmann::json& json);

// A request that cannot be served, with its HTTP status.
class HttpError : public std::runtime_error {
 public:
  HttpError(int status, const std::string& message, std::string type = "invalid_request_error")
      : std::runtime_error(message), status_(status), message_(message), type_(std::move(type)) {}
  int status() const { return status_; }
  std::string Body() const;

 private:
  int status_;
  std::string message_;  // complete, whereas what() ends at a NUL that a client sent
  std::string type_;
};

// The error for a model that is not the one served.
HttpError UnknownModel(const std::string& asked, const std::string& served);

struct Completion {
  std::string id, model;
  int64_t created;  // seconds since 1970
  std::vector<std::vector<int64_t>> prompts;
  skd_row_options options;
  std::vector<std::string> stops;
  bool stream;
  bool include_usage;        // the last piece of a stream says how many tokens were used
  bool usage_in_each_piece;  // all others do, too
  bool gives_ids;            // answers hold token ids, because there is no tokenizer
};

// What the server allows.
struct Limits {
  uint32_t max_prompt_tokens, max_new_tokens, max_prompts;
  uint64_t vocab_size;
  uint64_t max_prompt_bytes;  // of a prompt given as text
};

// Throws HttpError 400 for anything that is malformed, out of range or not supported.
Completion ParseCompletion(const std::string& body, const std::string& model, const Limits& limits,
                           skipdecode::Tokenizer* tokenizer);

struct Choice {
  std::string text;
  std::vector<int64_t> tokens;
  std::optional<std::string> finish_reason;
};

using Choices = std::vector<std::pair<size_t, Choice>>;  // each with its prompt's index in the request

// The whole answer, or one piece of a stream; `completion_tokens` adds the token counts.
nlohmann::json AnswerJson(const Completion& completion, const Choices& choices, std::optional<uint64_t> completion_tokens);

// Cuts text off before the first stop string, and holds back what may be the beginning of one.
class StopFilter {
 public:
  explicit StopFilter(const std::vector<std::string>& stops) : stops_(stops) {}
  // Append text; returns what may be sent now.
  std::string Add(const std::string& text);
  // What is still held back when the text has ended; empty if a stop string ended it.
  std::string Rest();
  bool stopped() const { return stopped_; }

 private:
  const std::vector<std::string>& stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace service
