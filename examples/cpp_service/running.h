// A request on its way: its rows, and the text that each gives.
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
  // `tokenizer`: none where answers are token ids. `counter` counts those that live.
  Running(Completion asked, skipdecode::Tokenizer* tokenizer, Clock::time_point arrived, Clock::time_point deadline,
          std::atomic<int>* counter);
  ~Running();  // whoever still decodes for nobody stops
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  std::vector<std::shared_ptr<Row>> rows() const;
  bool stream() const { return completion_.stream; }
  // Wait for what decides the answer's status. Throws HttpError where there is nothing to answer with, or nobody to answer.
  void WaitForFirst(const std::function<bool()>& client_gone);
  // The next piece of a stream, or at the end the whole answer; empty where a moment brought nothing to tell.
  std::string Next();
  bool Ended() const;

 private:
  struct Part {
    std::shared_ptr<Row> row;
    std::unique_ptr<skipdecode::TextStream> text;  // none without a tokenizer
    StopFilter filter;
    Choice choice;
    std::optional<End> end;  // of its row, unless a stop string was before that
  };

  Choices Take();
  std::string Whole() const;
  uint64_t Tokens() const;

  const Completion completion_;
  const std::shared_ptr<Mailbox> mailbox_ = std::make_shared<Mailbox>();
  std::vector<Part> parts_;
  Choices first_;  // what came before the answer's head was sent
  std::atomic<int>* const counter_;
};

}  // namespace service
