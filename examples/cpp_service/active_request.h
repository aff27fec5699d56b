// A request that is being served: its rows, and the text that each has produced.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <skipdecode/skipdecode.hpp>
#include <string>
#include <vector>

#include "batcher.h"
#include "completion.h"

namespace service {

class ActiveRequest {
 public:
  // `tokenizer` is null if answers are token ids. `active_requests` counts the instances that exist.
  ActiveRequest(Completion completion, skipdecode::Tokenizer* tokenizer, Clock::time_point arrived, Clock::time_point deadline,
                std::atomic<int>* active_requests);
  ~ActiveRequest();  // cancels the rows that still decode
  ActiveRequest(const ActiveRequest&) = delete;
  ActiveRequest& operator=(const ActiveRequest&) = delete;

  std::vector<std::shared_ptr<Row>> rows() const;
  bool stream() const { return completion_.stream; }
  // Wait for the first news, which decides the answer's status. Throws HttpError if there is nothing to answer with, or if the
  // client is gone.
  void WaitForFirstNews(const std::function<bool()>& client_gone);
  // The next piece of a stream or, without streaming, the whole answer at its end. Empty if there is nothing to send yet.
  std::string NextPiece();
  bool Ended() const;

 private:
  struct PromptAnswer {
    std::shared_ptr<Row> row;
    std::unique_ptr<skipdecode::TextStream> text_stream;  // null without a tokenizer
    StopFilter filter;
    Choice choice;
    std::optional<EndReason> end;  // of its row; not set if a stop string came first
  };

  Choices TakeNews();
  std::string WholeAnswer() const;
  uint64_t NumTokens() const;

  const Completion completion_;
  const std::shared_ptr<Mailbox> mailbox_ = std::make_shared<Mailbox>();
  std::vector<PromptAnswer> answers_;
  Choices first_news_;  // news that came before the answer's head was sent
  std::atomic<int>* const active_requests_;
};

}  // namespace service
