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
  std::optional<std::string> target;  // unset: cpu, or cuda if the bundle has no cpu engines
  bool full_depth = false;            // compute every layer at every position
  int port = 8080;
  size_t queue_length = 64;
  size_t connections = 256;
  uint32_t rows = 8;
  uint32_t max_prompt_tokens = 0;                     // per row; 0: half of the bundle's length
  uint32_t max_new_tokens = 0;                        // per row; 0: the rest of the bundle's length
  uint32_t max_prompt_bytes = 0;                      // per prompt given as text; 0: 32 times max_prompt_tokens
  uint32_t threads = 0;                               // size of the process's thread pool; 0: one thread per usable core
  std::chrono::milliseconds timeout{60'000};          // for a request that has arrived, waiting included
  std::chrono::milliseconds arrival_timeout{10'000};  // for a whole request to arrive
};

class Service {
 public:
  // Throws skipdecode::Error.
  explicit Service(const Settings& settings);
  // Start listening, and all threads that serving needs. Returns the port (settings.port 0: any free one). Throws
  // std::runtime_error if the address cannot be bound, std::system_error if threads cannot be started.
  int Bind();
  void Serve();  // until Stop; throws std::runtime_error if clients cannot connect any more
  // Refuse new requests, finish running ones (none takes longer than `timeout`), then let Serve return.
  void Stop();

 private:
  void AddRoutes();
  HttpError LateError() const;
  std::string ReadBody(const httplib::Request& request, const httplib::Response& response,
                       const httplib::ContentReader& reader) const;
  void ServeCompletion(const httplib::Request& request, const std::string& body, httplib::Response& response);

  const Settings settings_;
  Metrics metrics_;
  skipdecode::Bundle bundle_;
  std::unique_ptr<skipdecode::Tokenizer> tokenizer_;  // null if the bundle has none that works in C++
  std::string model_;
  Limits limits_{};
  std::unique_ptr<Batcher> batcher_;
  HttpServer server_;
  std::atomic<bool> stopping_{false};
  std::atomic<int> active_requests_{0};  // requests that are being served
};

}  // namespace service
