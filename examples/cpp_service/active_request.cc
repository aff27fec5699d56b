#include "active_request.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

namespace service {
namespace {

using Json = nlohmann::json;
constexpr std::chrono::milliseconds kPollInterval{50};  // between checks of the client's connection

const char* FinishReasonOf(EndReason reason) {
  switch (reason) {
    case EndReason::kStop:
      return "stop";
    case EndReason::kLength:
      return "length";
    case EndReason::kTimeout:
      return "timeout";
    case EndReason::kNoMemory:
      return "refused";
    default:
      return "error";
  }
}

}  // namespace

ActiveRequest::ActiveRequest(Completion completion, skipdecode::Tokenizer* tokenizer, Clock::time_point arrived,
                             Clock::time_point deadline, std::atomic<int>* active_requests)
    : completion_(std::move(completion)), active_requests_(active_requests) {
  for (size_t index = 0; index < completion_.prompts.size(); ++index) {
    skd_row_options options = completion_.options;
    options.generator_row += static_cast<uint32_t>(index);  // as in skd_generate: equal prompts get different samples
    answers_.push_back({std::make_shared<Row>(completion_.prompts[index], options, arrived, deadline, mailbox_, index),
                        tokenizer == nullptr ? nullptr : std::make_unique<skipdecode::TextStream>(*tokenizer),
                        StopFilter(completion_.stops),
                        {},
                        std::nullopt});
  }
  ++*active_requests_;
}

ActiveRequest::~ActiveRequest() {
  for (const PromptAnswer& answer : answers_) answer.row->Cancel();
  --*active_requests_;
}

std::vector<std::shared_ptr<Row>> ActiveRequest::rows() const {
  std::vector<std::shared_ptr<Row>> rows;
  rows.reserve(answers_.size());
  for (const PromptAnswer& answer : answers_) rows.push_back(answer.row);
  return rows;
}

void ActiveRequest::WaitForFirstNews(const std::function<bool()>& client_gone) {
  while (first_news_.empty()) {
    // a client that has only closed its sending half can read this
    if (client_gone())
      throw HttpError(400, "the client closed its side of the connection before its answer was ready: keep it open");
    first_news_ = TakeNews();
  }
  if (NumTokens() > 0) return;  // the answer has begun
  for (const PromptAnswer& answer : answers_) {
    if (answer.end == EndReason::kFailed) throw HttpError(500, "decoding failed", "server_error");
    if (answer.end == EndReason::kNoSession)
      throw HttpError(500, "the engines cannot decode: the server retries every second, restart it if this lasts",
                      "server_error");
    if (answer.end == EndReason::kNoMemory) throw HttpError(503, "no memory left to decode in, try again", "server_error");
    if (answer.end == EndReason::kTimeout)
      throw HttpError(503, "no token came in time: try again, or send a shorter prompt", "server_error");
  }
}

std::string ActiveRequest::NextPiece() {
  const Choices news = first_news_.empty() ? TakeNews() : std::exchange(first_news_, {});
  if (!completion_.stream) return Ended() ? WholeAnswer() : std::string();
  std::string piece;
  const auto used = completion_.usage_in_each_piece ? std::optional(NumTokens()) : std::nullopt;
  if (!news.empty()) piece = "data: " + Dump(AnswerJson(completion_, news, used)) + "\n\n";
  if (!Ended()) return piece;
  if (completion_.include_usage) piece += "data: " + Dump(AnswerJson(completion_, {}, NumTokens())) + "\n\n";
  return piece + "data: [DONE]\n\n";
}

bool ActiveRequest::Ended() const {
  return std::all_of(answers_.begin(), answers_.end(),
                     [](const PromptAnswer& answer) { return answer.choice.finish_reason.has_value(); });
}

// What has come since the last call, by prompt; waits for kPollInterval at most.
Choices ActiveRequest::TakeNews() {
  std::map<size_t, Choice> news;
  for (const Mailbox::News& each : mailbox_->Take(kPollInterval)) {
    PromptAnswer& answer = answers_[each.row];
    if (answer.choice.finish_reason) continue;  // a stop string ended it before its row ended
    Choice& added = news[each.row];
    if (each.token) {
      added.tokens.push_back(*each.token);
      if (answer.text_stream != nullptr) added.text += answer.filter.Add(answer.text_stream->Add(*each.token));
    }
    if (each.end) {
      if (answer.text_stream != nullptr) added.text += answer.filter.Add(answer.text_stream->End());
      added.text += answer.filter.Rest();
      added.finish_reason = FinishReasonOf(*each.end);
      if (!answer.filter.stopped()) answer.end = each.end;
    }
    if (answer.filter.stopped()) {
      answer.row->Complete();
      added.finish_reason = "stop";
    }
    answer.choice.finish_reason = added.finish_reason;
  }
  for (const auto& [index, added] : news) {
    Choice& whole = answers_[index].choice;
    whole.text += added.text;
    whole.tokens.insert(whole.tokens.end(), added.tokens.begin(), added.tokens.end());
  }
  return {news.begin(), news.end()};
}

std::string ActiveRequest::WholeAnswer() const {
  Choices choices;
  for (size_t index = 0; index < answers_.size(); ++index) choices.emplace_back(index, answers_[index].choice);
  return Dump(AnswerJson(completion_, choices, NumTokens()));
}

uint64_t ActiveRequest::NumTokens() const {
  uint64_t tokens = 0;
  for (const PromptAnswer& answer : answers_) tokens += answer.choice.tokens.size();
  return tokens;
}

}  // namespace service
