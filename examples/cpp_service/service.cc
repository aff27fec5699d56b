#include "service.h"

#include <algorithm>
#include <cctype>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "active_request.h"

namespace service {
namespace {

using Json = nlohmann::json;
constexpr std::chrono::milliseconds kPollInterval{50};  // between checks of whether all requests have ended
constexpr std::chrono::seconds kDrainTime{5};           // at shutdown, for clients to read the end of their answers
constexpr char kCompletionsPath[] = "/v1/completions";
constexpr char kContentLength[] = "Content-Length", kTransferEncoding[] = "Transfer-Encoding";
constexpr char kTooLarge[] = "the body is larger than 1 MiB";
constexpr size_t kMaxBodyBytes = size_t{1} << 20;
constexpr uint64_t kPromptBytesPerToken = 32;  // generous: English text has four to five bytes per token

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// Why a body must not be read, or nullopt if it may be. Bodies are refused that another HTTP parser could delimit
// differently: if a proxy in front of this server did, the rest of a body would become the next client's request (RFC 9112, 5.1
// and 6.3).
std::optional<HttpError> BodyRefusal(const httplib::Request& request) {
  const auto spaced = [](const auto& header) { return header.first.find_first_of(" \t") != std::string::npos; };
  if (std::any_of(request.headers.begin(), request.headers.end(), spaced)) {
    return HttpError(400, "a header's name contains a space");
  }
  for (const char* const once : {kContentLength, kTransferEncoding}) {
    if (request.headers.count(once) > 1) return HttpError(400, std::string(once) + " is given more than once");
  }
  const auto found = request.headers.find(kContentLength);
  if (found == request.headers.end()) return std::nullopt;
  if (request.has_header(kTransferEncoding)) {
    return HttpError(400, "Content-Length and Transfer-Encoding are both given: leave one of them out");
  }
  const std::string& length = found->second;  // complete, whereas httplib's get_header_value ends at a NUL
  if (length.empty() || length.find_first_not_of("0123456789") != std::string::npos) {
    return HttpError(400, "Content-Length '" + length.substr(0, 40) + "' is not a number of bytes");
  }
  if (length.size() > 19 || std::stoull(length) > kMaxBodyBytes) return HttpError(413, kTooLarge);
  return std::nullopt;
}

void AnswerWithError(const HttpError& error, httplib::Response* response) {
  response->status = error.status();
  response->set_content(error.Body(), "application/json");
}

// The message for a request that no handler has seen.
std::string RefusalMessage(const httplib::Request& request, int status) {
  switch (status) {
    case 413:
      return kTooLarge;
    case 404:
      return request.method + " " + request.path.substr(0, 80) + " is not served";
    case 414:
      return "the path is longer than 8 KiB";
    case 416:
      return "the Range header cannot be followed: leave it out";
    default:
      return "the request's head is not HTTP/1.1, or a line of it is longer than 8 KiB";
  }
}

}  // namespace

Service::Service(const Settings& settings)
    : settings_(settings),
      bundle_([&settings] {
        skd_load_options options = skipdecode::LoadOptions();
        options.threads = settings.threads;
        if (settings.target) options.target = settings.target->c_str();
        if (!settings.onnxruntime_library.empty()) options.onnxruntime_library = settings.onnxruntime_library.c_str();
        return skipdecode::Bundle::Load(settings.bundle, options);
      }()),
      server_(settings.arrival_timeout) {
  const skd_bundle_info info = bundle_.info();
  model_ = info.name;
  try {
    tokenizer_ = std::make_unique<skipdecode::Tokenizer>(
        bundle_, settings.genai_library.empty() ? nullptr : settings.genai_library.c_str());
  } catch (const skipdecode::Error& error) {
    if (error.code() != SKD_ERROR_TOKENIZER) throw;
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
  // the vocabulary's longest token gives no bound, because tokenizers drop and merge text
  limits_.max_prompt_bytes =
      settings.max_prompt_bytes > 0 ? settings.max_prompt_bytes : kPromptBytesPerToken * limits_.max_prompt_tokens;
  room.max_prompt_tokens = limits_.max_prompt_tokens;
  room.max_new_tokens = limits_.max_new_tokens;
  room.full_depth = settings.full_depth ? 1 : 0;
  batcher_ = std::make_unique<Batcher>(bundle_, room, settings.queue_length, &metrics_);

  server_.set_payload_max_length(kMaxBodyBytes);
  server_.set_exception_handler([](const auto&, httplib::Response& response, const std::exception_ptr&) {
    AnswerWithError(HttpError(500, "internal error", "server_error"), &response);
  });
  server_.set_error_handler([this](const httplib::Request& request, httplib::Response& response) {
    if (!response.body.empty()) return;
    const bool broken = response.status == 400;
    AnswerWithError(broken && HttpServer::ArrivedLate() ? LateError()
                    : broken && HttpServer::HeadTooLong()
                        ? HttpError(431, "the request's head is longer than 64 KiB, or has more than 100 headers")
                        : HttpError(response.status, RefusalMessage(request, response.status)),
                    &response);
  });
  AddRoutes();
}

void Service::AddRoutes() {
  // refuses what is not served before its body is read
  server_.set_pre_routing_handler([](const httplib::Request& request, httplib::Response& response) {
    const bool reads = request.method == "GET" || request.method == "HEAD";
    const bool served = reads || (request.method == "POST" && request.path == kCompletionsPath);
    const std::optional<HttpError> refused = served ? BodyRefusal(request) : HttpError(404, RefusalMessage(request, 404));
    if (!refused) return HttpServer::HandlerResponse::Unhandled;
    AnswerWithError(*refused, &response);
    return HttpServer::HandlerResponse::Handled;
  });
  server_.Get("/health", [this](const httplib::Request&, httplib::Response& response) {
    const bool stopping = stopping_, failing = batcher_->failing();
    const char* const status = stopping ? "stopping" : failing ? "failing" : "ok";
    response.status = stopping || failing ? 503 : 200;
    response.set_content(Dump(Json{{"status", status}}), "application/json");
  });
  server_.Get("/metrics", [this](const httplib::Request&, httplib::Response& response) {
    response.set_content(metrics_.Text(), "text/plain; version=0.0.4");
  });
  const Json model = {{"id", model_}, {"object", "model"}, {"created", 0}, {"owned_by", "skipdecode"}};
  server_.Get("/v1/models", [model](const httplib::Request&, httplib::Response& response) {
    response.set_content(Dump(Json{{"object", "list"}, {"data", Json::array({model})}}), "application/json");
  });
  // not (.+): std::regex takes stack for each character, more than a thread may have for the longest paths
  server_.Get("/v1/models/(.{1,300})", [this, model](const httplib::Request& request, httplib::Response& response) {
    if (request.matches[1] == model_) {
      response.set_content(Dump(model), "application/json");
    } else {
      AnswerWithError(UnknownModel(request.matches[1], model_), &response);
    }
  });
  // reads the body itself: httplib 0.11 does not limit chunked bodies, and takes curl's default type for a form of at most 8 KiB
  server_.Post(kCompletionsPath,
               [this](const httplib::Request& request, httplib::Response& response, const httplib::ContentReader& reader) {
                 try {
                   ServeCompletion(request, ReadBody(request, response, reader), response);
                 } catch (const HttpError& error) {
                   if (error.status() == 429 || error.status() == 503) response.set_header("Retry-After", "1");
                   AnswerWithError(error, &response);
                 }
               });
}

int Service::Bind() { return server_.Bind(settings_.host, settings_.port, settings_.connections); }

void Service::Serve() { server_.Serve(); }

void Service::Stop() {
  stopping_ = true;
  server_.StopReading();
  const Clock::time_point deadline = Clock::now() + settings_.timeout + kDrainTime;
  while (active_requests_ > 0 && Clock::now() < deadline) std::this_thread::sleep_for(kPollInterval);
  if (active_requests_ > 0) server_.StopWriting();
  server_.Stop();
}

std::string Service::ReadBody(const httplib::Request& request, const httplib::Response& response,
                              const httplib::ContentReader& reader) const {
  const std::string transfer_encoding = Lower(request.get_header_value(kTransferEncoding));
  const std::string content_encoding = Lower(request.get_header_value("Content-Encoding"));
  if ((!content_encoding.empty() && content_encoding != "identity") ||
      (!transfer_encoding.empty() && transfer_encoding != "chunked") || request.is_multipart_form_data()) {
    throw HttpError(415, "the body is compressed, or multipart: send plain JSON");
  }
  std::string body;
  if (transfer_encoding.empty() && !request.has_header(kContentLength))
    return body;  // httplib would read until the client is gone
  bool too_large = false;
  const bool complete = reader([&](const char* data, size_t size) {
    too_large = body.size() + size > kMaxBodyBytes;
    if (!too_large) body.append(data, size);
    return !too_large;
  });
  if (HttpServer::ArrivedLate()) throw LateError();  // also where only the last line is missing, which httplib 0.18 does without
  if (complete) return body;
  // httplib 0.18 also measures chunks itself, before it reads them
  if (too_large || response.status == 413) throw HttpError(413, kTooLarge);
  throw HttpError(400, "the body is malformed or incomplete");
}

// The error for a request that did not arrive in time.
HttpError Service::LateError() const {
  if (stopping_) return {503, "the server is stopping", "server_error"};
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(settings_.arrival_timeout).count();
  return {408, "the request did not arrive within " + std::to_string(seconds) + " s"};
}

void Service::ServeCompletion(const httplib::Request& request, const std::string& body, httplib::Response& response) {
  const Clock::time_point arrived = Clock::now();  // before its texts are tokenised, which may take a while
  auto active_request =
      std::make_shared<ActiveRequest>(ParseCompletion(body, model_, limits_, tokenizer_.get()), tokenizer_.get(), arrived,
                                      arrived + settings_.timeout, &active_requests_);
  // a request that passes here is already counted, so Stop waits for it
  if (stopping_) throw HttpError(503, "the server is stopping", "server_error");
  if (!batcher_->Submit(active_request->rows())) throw HttpError(429, "the queue is full, try again", "rate_limit_error");
  active_request->WaitForFirstNews(HttpServer::ClientGone);  // from then on, `send_next` checks the client
  const auto send_next = [active_request](size_t, httplib::DataSink& sink) {
    const std::string piece = active_request->NextPiece();
    if (!sink.is_writable()) return false;  // the client is gone: ~ActiveRequest cancels its rows
    if (!piece.empty() && !sink.write(piece.data(), piece.size())) return false;
    if (active_request->Ended()) sink.done();
    return true;
  };
  const std::string type = active_request->stream() ? "text/event-stream" : "application/json";
  if (request.version == "HTTP/1.0") {  // has no chunks: the answer ends with the connection
    response.set_content_provider(type, send_next);
  } else {
    response.set_chunked_content_provider(type, send_next);
  }
}

}  // namespace service
