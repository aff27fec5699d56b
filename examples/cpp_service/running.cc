#include "running.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

namespace service {
namespace {

using Json = nlohmann::json;
constexpr std::chrono::milliseconds kMoment{50};  // between checks of the client's connection

const char* ReasonOf(End end) {
  switch (end) {
    case End::kStop:
      return "stop";
    case End::kLength:
      return "length";
    case End::kTimeout:
      return "timeout";
    case End::kRefused:
      return "refused";
    default:
      return "error";
  }
}

}  // namespace

Running::Running(Completion asked, skipdecode::Tokenizer* tokenizer, Clock::time_point arrived, Clock::time_point deadline,
                 std::atomic<int>* counter)
    : completion_(std::move(asked)), counter_(counter) {
  for (size_t index = 0; index < completion_.prompts.size(); ++index) {
    skd_row_options options = completion_.options;
    options.generator_row += static_cast<uint32_t>(index);  // as in skd_generate: equal prompts get different samples
    parts_.push_back({std::make_shared<Row>(completion_.prompts[index], options, arrived, deadline, mailbox_, index),
                      tokenizer == nullptr ? nullptr : std::make_unique<skipdecode::TextStream>(*tokenizer),
                      StopFilter(completion_.stops),
                      {},
                      std::nullopt});
  }
  ++*counter_;
}

Running::~Running() {
  for (const Part& part : parts_) part.row->Cancel();
  --*counter_;
}

std::vector<std::shared_ptr<Row>> Running::rows() const {
  std::vector<std::shared_ptr<Row>> rows;
  rows.reserve(parts_.size());
  for (const Part& part : parts_) rows.push_back(part.row);
  return rows;
}

void Running::WaitForFirst(const std::function<bool()>& client_gone) {
  while (first_.empty()) {
    // a client that has only closed its sending half can read this
    if (client_gone())
      throw HttpError(400, "the client closed its side of the connection before its answer was there: keep it open");
    first_ = Take();
  }
  for (const Part& part : parts_) {
    if (part.end == End::kFailed) throw HttpError(500, "decoding failed", "server_error");
    if (part.end == End::kLost)
      throw HttpError(500, "the engines cannot decode: the server tries again each second, start it again where that lasts",
                      "server_error");
    if (part.end == End::kRefused) throw HttpError(503, "no memory to decode in, try again", "server_error");
    if (part.end == End::kTimeout && part.choice.tokens.empty()) {
      throw HttpError(503, "waited too long in the queue, try again", "server_error");
    }
  }
}

std::string Running::Next() {
  const Choices news = first_.empty() ? Take() : std::exchange(first_, {});
  if (!completion_.stream) return Ended() ? Whole() : std::string();
  std::string told;
  if (!news.empty()) told = "data: " + Dump(Answer(completion_, news, std::nullopt)) + "\n\n";
  if (!Ended()) return told;
  if (completion_.include_usage) told += "data: " + Dump(Answer(completion_, {}, Tokens())) + "\n\n";
  return told + "data: [DONE]\n\n";
}

bool Running::Ended() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.choice.finish_reason.has_value(); });
}

// What has come since the last call, by part; waits for kMoment at most.
Choices Running::Take() {
  std::map<size_t, Choice> news;
  for (const Mailbox::News& each : mailbox_->Take(kMoment)) {
    Part& part = parts_[each.row];
    if (part.choice.finish_reason) continue;  // a stop string ended it before its row ended
    Choice& now = news[each.row];
    if (each.token) {
      now.tokens.push_back(*each.token);
      if (part.text != nullptr) now.text += part.filter.Add(part.text->Add(*each.token));
    }
    if (each.end) {
      if (part.text != nullptr) now.text += part.filter.Add(part.text->End());
      now.text += part.filter.Rest();
      now.finish_reason = ReasonOf(*each.end);
      if (!part.filter.stopped()) part.end = each.end;
    }
    if (part.filter.stopped()) {
      part.row->Complete();
      now.finish_reason = "stop";
    }
    part.choice.finish_reason = now.finish_reason;
  }
  for (const auto& [index, now] : news) {
    Choice& all = parts_[index].choice;
    all.text += now.text;
    all.tokens.insert(all.tokens.end(), now.tokens.begin(), now.tokens.end());
  }
  return {news.begin(), news.end()};
}

std::string Running::Whole() const {
  Choices choices;
  for (size_t index = 0; index < parts_.size(); ++index) choices.emplace_back(index, parts_[index].choice);
  return Dump(Answer(completion_, choices, Tokens()));
}

uint64_t Running::Tokens() const {
  uint64_t tokens = 0;
  for (const Part& part : parts_) tokens += part.choice.tokens.size();
  return tokens;
}

}  // namespace service
