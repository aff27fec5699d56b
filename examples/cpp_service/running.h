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

class Running {
 public:
  // `tokenizer` is null if answers are token ids. `counter` counts the instances that exist.
  Running(Completion asked, skipdecode::Tokenizer* tokenizer, Clock::time_point arrived, Clock::time_point deadline,
          std::atomic<int>* counter);
  ~Running();  // cancels the rows that still decode
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  std::vector<std::shared_ptr<Row>> rows() const;
  bool stream() const { return completion_.stream; }
  // Wait for the first news, which decides the answer's status. Throws HttpError if there is nothing to answer with, or if the
  // client is gone.
  void WaitForFirst(const std::function<bool()>& client_gone);
  // The next piece of a stream or, without streaming, the whole answer at its end. Empty if there is nothing to send yet.
  std::string Next();
  bool Ended() const;

 private:
  struct Part {
    std::shared_ptr<Row> row;
    std::unique_ptr<skipdecode::TextStream> text;  // null without a tokenizer
    StopFilter filter;
    Choice choice;
    std::optional<End> end;  // of its row; not set if a stop string came first
  };

  Choices Take();
  std::string Whole() const;
  uint64_t Tokens() const;

  const Completion completion_;
  const std::shared_ptr<Mailbox> mailbox_ = std::make_shared<Mailbox>();
  std::vector<Part> parts_;
  Choices first_;  // news that came before the answer's head was sent
  std::atomic<int>* const counter_;
};

}  // namespace service
