// The HTTP side: routes, limits, streams, shutdown.
#pragma once

#include <httplib.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <skipdecode/skipdecode.hpp>
#include <string>

#include "batcher.h"
#include "completion.h"
#include "metrics.h"

namespace service {

struct Settings {
  std::string bundle, host = "127.0.0.1", genai_library, target, onnxruntime_library;
  int port = 8080;
  size_t queue_length = 64;
  size_t connections = 256;
  uint32_t rows = 8, max_prompt_tokens = 0, max_new_tokens = 0, threads = 0;
  std::chrono::milliseconds timeout{60'000};  // of a request, waiting included
};

class HttpServer : public httplib::Server {
 public:
  // Room for so many connections that wait to be accepted; httplib's own 5 make clients that come at once time out.
  bool ListenFor(int connections) { return ::listen(svr_sock_, connections) == 0; }
};

class Service {
 public:
  // Throws skipdecode::Error.
  explicit Service(const Settings& settings);
  // Bind the port; throws std::runtime_error where it is taken. Returns it (settings.port 0: any).
  int Bind();
  void Serve();  // until Stop
  void Stop();   // refuse what is new, finish what runs, then return from Serve

 private:
  void Complete(const httplib::Request& request, httplib::Response& response);
  void Stream(const std::shared_ptr<struct Running>& running, httplib::Response& response);

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
