#include "service.h"

#include <algorithm>
#include <iostream>
#include <stdexcept>
#include <thread>
#include <utility>

namespace service {
namespace {

using Json = nlohmann::json;
constexpr std::chrono::milliseconds kMoment{50};  // between looks at the client's connection

std::string Dump(const Json& json) { return json.dump(-1, ' ', true, Json::error_handler_t::replace); }

const char* ReasonOf(Row::End end) {
  switch (end) {
    case Row::End::kStop:
      return "stop";
    case Row::End::kLength:
      return "length";
    case Row::End::kTimeout:
      return "timeout";
    default:
      return "error";
  }
}

}  // namespace

// A request on its way: its rows, and the text that each gives.
struct Running {
  struct Part {
    std::shared_ptr<Row> row;
    std::unique_ptr<skipdecode::TextStream> text;  // none without a tokenizer
    StopFilter filter;
    Choice choice;
  };

  Running(Completion asked, skipdecode::Tokenizer* tokenizer, Clock::time_point deadline, std::atomic<int>* counter)
      : completion(std::move(asked)), active(counter) {
    ++*active;
    for (const auto& prompt : completion.prompts) {
      parts.push_back({std::make_shared<Row>(prompt, completion.options, deadline),
                       tokenizer == nullptr ? nullptr : std::make_unique<skipdecode::TextStream>(*tokenizer),
                       StopFilter(completion.stops),
                       {}});
    }
  }
  ~Running() {  // whoever still decodes for nobody stops
    for (const Part& part : parts) part.row->Cancel();
    --*active;
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  // Take what came, for a moment at most; the text that is new, by part.
  std::vector<std::pair<size_t, Choice>> Take() {
    std::vector<std::pair<size_t, Choice>> news;
    for (size_t index = 0; index < parts.size(); ++index) {
      Part& part = parts[index];
      if (part.choice.finish_reason) continue;
      const Row::Next next = part.row->Wait(kMoment);
      Choice now;
      for (const int64_t token : next.tokens) {
        if (part.filter.stopped()) break;
        ++now.tokens;
        if (part.text != nullptr) now.text += part.filter.Add(part.text->Add(token));
      }
      if (part.filter.stopped()) {
        part.row->Cancel();
        now.finish_reason = "stop";
      } else if (next.end) {
        if (part.text != nullptr) now.text += part.filter.Add(part.text->End());
        now.text += part.filter.Rest();
        now.finish_reason = part.filter.stopped() ? "stop" : ReasonOf(*next.end);
      }
      if (now.tokens == 0 && !now.finish_reason) continue;
      part.choice.text += now.text;
      part.choice.tokens += now.tokens;
      part.choice.finish_reason = now.finish_reason;
      news.emplace_back(index, std::move(now));
    }
    return news;
  }

  bool Ended() const {
    return std::all_of(parts.begin(), parts.end(), [](const Part& part) { return part.choice.finish_reason.has_value(); });
  }

  uint64_t Tokens() const {
    uint64_t tokens = 0;
    for (const Part& part : parts) tokens += part.choice.tokens;
    return tokens;
  }

  std::string Whole() const {
    std::vector<std::pair<size_t, Choice>> choices;
    for (size_t index = 0; index < parts.size(); ++index) choices.emplace_back(index, parts[index].choice);
    return Dump(Answer(completion, choices, Tokens()));
  }

  Completion completion;
  std::vector<Part> parts;
  std::atomic<int>* const active;
  std::vector<std::pair<size_t, Choice>> first;  // what came before the answer's head was sent
};

Service::Service(const Settings& settings)
    : settings_(settings), bundle_([&settings] {
        skd_load_options options = skipdecode::LoadOptions();
        options.threads = settings.threads;
        if (!settings.target.empty()) options.target = settings.target.c_str();
        if (!settings.onnxruntime_library.empty()) options.onnxruntime_library = settings.onnxruntime_library.c_str();
        return skipdecode::Bundle::Load(settings.bundle, options);
      }()) {
  const skd_bundle_info info = bundle_.info();
  model_ = info.name;
  try {
    tokenizer_ = std::make_unique<skipdecode::Tokenizer>(
        bundle_, settings.genai_library.empty() ? nullptr : settings.genai_library.c_str());
  } catch (const skipdecode::Error& error) {
    if (error.code() != SKD_ERROR_BUNDLE) throw;
    std::cerr << error.what() << " (this server takes and gives token ids only)" << std::endl;
  }
  skd_session_options room = skipdecode::SessionOptions();
  room.max_rows = static_cast<uint32_t>(std::min<uint64_t>(settings.rows, info.max_batch));
  limits_.max_prompt_tokens =
      settings.max_prompt_tokens > 0 ? settings.max_prompt_tokens : static_cast<uint32_t>(info.max_length / 2);
  limits_.max_new_tokens =
      settings.max_new_tokens > 0 ? settings.max_new_tokens : static_cast<uint32_t>(info.max_length - limits_.max_prompt_tokens);
  limits_.max_prompts = static_cast<uint32_t>(settings.queue_length);
  limits_.vocab_size = info.vocab_size;
  room.max_prompt_tokens = limits_.max_prompt_tokens;
  room.max_new_tokens = limits_.max_new_tokens;
  batcher_ = std::make_unique<Batcher>(bundle_, room, settings.queue_length, &metrics_);

  const size_t connections = settings.connections;
  server_.new_task_queue = [connections] { return new httplib::ThreadPool(connections); };
  server_.set_payload_max_length(1 << 20);
  server_.set_read_timeout(5);
  server_.set_write_timeout(5);
  // longer than usual clients keep an idle connection (5 s): who closes last never meets a request on a connection just closed
  server_.set_keep_alive_timeout(6);
  server_.set_keep_alive_max_count(100'000);
  server_.set_tcp_nodelay(true);
  server_.set_exception_handler([](const auto&, httplib::Response& response, const std::exception_ptr&) {
    response.status = 500;
    response.set_content(HttpError(500, "internal error", "server_error").Body(), "application/json");
  });
  server_.set_error_handler([](const httplib::Request& request, httplib::Response& response) {
    if (!response.body.empty()) return;
    const bool large = response.status == 413;
    const std::string what =
        large ? "the body is larger than 1 MiB" : request.method + " " + request.path.substr(0, 80) + " is not served";
    response.set_content(HttpError(response.status, what).Body(), "application/json");
  });
  server_.Get("/health", [this](const httplib::Request&, httplib::Response& response) {
    response.status = stopping_ ? 503 : 200;
    response.set_content(stopping_ ? R"({"status":"stopping"})" : R"({"status":"ok"})", "application/json");
  });
  server_.Get("/metrics", [this](const httplib::Request&, httplib::Response& response) {
    response.set_content(metrics_.Text(), "text/plain; version=0.0.4");
  });
  server_.Get("/v1/models", [this](const httplib::Request&, httplib::Response& response) {
    const Json model = {{"id", model_}, {"object", "model"}, {"created", 0}, {"owned_by", "skipdecode"}};
    response.set_content(Dump({{"object", "list"}, {"data", Json::array({model})}}), "application/json");
  });
  server_.Post("/v1/completions", [this](const httplib::Request& request, httplib::Response& response) {
    try {
      Complete(request, response);
    } catch (const HttpError& error) {
      response.status = error.status();
      if (error.status() == 429 || error.status() == 503) response.set_header("Retry-After", "1");
      response.set_content(error.Body(), "application/json");
    }
  });
}

int Service::Bind() {
  const int port = settings_.port == 0 ? server_.bind_to_any_port(settings_.host) : settings_.port;
  if (port < 0 || (settings_.port != 0 && !server_.bind_to_port(settings_.host, port))) {
    throw std::runtime_error(settings_.host + ":" + std::to_string(settings_.port) + ": cannot be bound; choose another --port");
  }
  if (!server_.ListenFor(static_cast<int>(settings_.connections))) throw std::runtime_error("cannot listen on the port");
  return port;
}

void Service::Serve() { server_.listen_after_bind(); }

void Service::Stop() {
  stopping_ = true;
  while (active_ > 0) std::this_thread::sleep_for(kMoment);
  server_.stop();
}

void Service::Complete(const httplib::Request& request, httplib::Response& response) {
  if (stopping_) throw HttpError(503, "the server is stopping", "server_error");
  auto running = std::make_shared<Running>(ParseCompletion(request.body, model_, limits_, tokenizer_.get()), tokenizer_.get(),
                                           Clock::now() + settings_.timeout, &active_);
  std::vector<std::shared_ptr<Row>> rows;
  for (const Running::Part& part : running->parts) rows.push_back(part.row);
  if (!batcher_->Submit(rows)) throw HttpError(429, "the queue is full, try again", "rate_limit_error");
  // the status is decided when the first tokens are there; from then on the client's connection is watched
  while (running->first.empty()) running->first = running->Take();
  for (const Running::Part& part : running->parts) {
    if (part.choice.finish_reason == "error") throw HttpError(500, "decoding failed", "server_error");
    if (part.choice.finish_reason == "timeout" && part.choice.tokens == 0) {
      throw HttpError(503, "waited too long in the queue, try again", "server_error");
    }
  }
  Stream(running, response);
}

void Service::Stream(const std::shared_ptr<Running>& running, httplib::Response& response) {
  const bool stream = running->completion.stream;
  response.set_chunked_content_provider(
      stream ? "text/event-stream" : "application/json", [running, stream](size_t, httplib::DataSink& sink) {
        const auto news = running->first.empty() ? running->Take() : std::exchange(running->first, {});
        if (!sink.is_writable()) return false;  // the client is gone: Running's end frees the rows
        std::string told;
        if (stream && !news.empty()) told = "data: " + Dump(Answer(running->completion, news, std::nullopt)) + "\n\n";
        if (running->Ended()) {
          if (stream && running->completion.include_usage) {
            told += "data: " + Dump(Answer(running->completion, {}, running->Tokens())) + "\n\n";
          }
          told += stream ? "data: [DONE]\n\n" : running->Whole();
        }
        if (!told.empty() && !sink.write(told.data(), told.size())) return false;
        if (running->Ended()) sink.done();
        return true;
      });
}

}  // namespace service
