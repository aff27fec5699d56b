// The HTTP side: routes, limits, streams, shutdown.
#pragma once

#include <httplib.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <skipdecode/skipdecode.hpp>
#include <string>

#include "batcher.h"
#include "completion.h"
#include "http_server.h"
#include "metrics.h"

namespace service {

struct Settings {
  std::string bundle, host = "127.0.0.1", genai_library, onnxruntime_library;
  std::optional<std::string> target;  // none: cpu, or cuda where the bundle has no cpu engines
  int port = 8080;
  size_t queue_length = 64;
  size_t connections = 256;
  uint32_t rows = 8;
  uint32_t max_prompt_tokens = 0;             // of a row; 0: half of the bundle's length
  uint32_t max_new_tokens = 0;                // of a row; 0: what is left of it
  uint32_t max_prompt_bytes = 0;              // of a prompt's text; 0: 32 for each of max_prompt_tokens
  uint32_t threads = 0;                       // of the process's one pool; 0: one for each usable core
  std::chrono::milliseconds timeout{60'000};  // of a request that is here, waiting included
  std::chrono::milliseconds arrival{10'000};  // of a whole request
};

class Service {
 public:
  // Throws skipdecode::Error.
  explicit Service(const Settings& settings);
  // Listen, with all threads that will be needed; returns the port (settings.port 0: any). Throws std::runtime_error for an
  // address that cannot be had, std::system_error for threads that cannot.
  int Bind();
  void Serve();  // until Stop; throws std::runtime_error where clients cannot connect any more
  // Refuse what is new, finish what runs (no request takes longer than `timeout`), then return from Serve.
  void Stop();

 private:
  void AddRoutes();
  HttpError Late() const;
  std::string ReadBody(const httplib::Request& request, const httplib::ContentReader& reader) const;
  void Complete(const httplib::Request& request, const std::string& body, httplib::Response& response);

  const Settings settings_;
  Metrics metrics_;
  skipdecode::Bundle bundle_;
  std::unique_ptr<skipdecode::Tokenizer> tokenizer_;  // none where the bundle has none
  std::string model_;
  Limits limits_{};
  std::unique_ptr<Batcher> batcher_;
  HttpServer server_;
  std::atomic<bool> stopping_{false};
  std::atomic<int> active_{0};  // requests whose rows are on their way
};

}  // namespace service
