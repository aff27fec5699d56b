// The service's batcher when sessions fail, on a stand-in for the library whose sessions fail on demand.
#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "active_request.h"
#include "batcher.h"
#include "completion.h"

struct skd_status {
  skd_code code;
};
struct skd_bundle {};
struct skd_tokenizer {};
struct skd_session {
  std::vector<uint64_t> rows;
  size_t joined = 0;  // of these, the last, whose first tokens are still to come
  std::optional<uint64_t> beginning;
  int parts = 0;  // of its prompt, that are still to run
};

namespace {

std::atomic<bool> slow_session{false}, no_memory{false}, gpu_lost{false}, engines_fail{false}, row_lost{false}, endless{false};
std::atomic<int> add_fails{SKD_OK}, part_fails{SKD_OK};  // with that code
std::atomic<int> prompt_parts{1};                        // of a prompt
std::atomic<int> sessions{0}, most_sessions{0}, sessions_made{0};
std::atomic<int64_t> token{7};  // that every step gives each row
size_t num_decoded_ids = 0;     // ids that were decoded
// to be read after the batcher's thread has ended
std::vector<uint32_t> generator_rows;  // of the rows that were added
// p: a part of a prompt ran, and it was not the last; a: a row joined; f: a step gave first tokens; d: it decoded
std::string calls;

}  // namespace

extern "C" {

skd_code skd_status_code(const skd_status* status) { return status->code; }
const char* skd_status_message(const skd_status* /*status*/) { return "told to fail"; }
void skd_status_destroy(skd_status* status) { delete status; }
skd_load_options skd_load_options_default() { return {}; }
skd_row_options skd_row_options_default() { return {}; }
skd_session_options skd_session_options_default() { return {sizeof(skd_session_options), 1, 0, 0, 0, nullptr, 0}; }

skd_status* skd_bundle_load(const char* /*path*/, const skd_load_options* /*options*/, skd_bundle** bundle) {
  *bundle = new skd_bundle;
  return nullptr;
}
void skd_bundle_destroy(skd_bundle* bundle) { delete bundle; }

skd_status* skd_session_create(const skd_bundle* /*bundle*/, const skd_session_options* /*options*/, skd_session** session) {
  if (slow_session) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  if (no_memory) return new skd_status{SKD_ERROR_CAPACITY};
  if (gpu_lost) return new skd_status{SKD_ERROR_TARGET};
  *session = new skd_session;
  ++sessions_made;
  most_sessions = std::max(most_sessions.load(), ++sessions);
  return nullptr;
}
void skd_session_destroy(skd_session* session) {
  delete session;
  --sessions;
}
skd_status* skd_session_begin(skd_session* session, const int64_t* /*prompt*/, size_t /*length*/, const skd_row_options* options,
                              uint64_t* row) {
  if (add_fails != SKD_OK) return new skd_status{static_cast<skd_code>(add_fails.load())};
  static std::atomic<uint64_t> next{0};
  *row = next++;
  session->beginning = *row;
  session->parts = prompt_parts;
  generator_rows.push_back(options->generator_row);
  return nullptr;
}
skd_status* skd_session_prefill(skd_session* session, uint32_t /*tokens*/, int* joined) {
  if (part_fails != SKD_OK) {
    session->beginning.reset();
    return new skd_status{static_cast<skd_code>(part_fails.load())};
  }
  *joined = --session->parts == 0 ? 1 : 0;
  calls += *joined != 0 ? 'a' : 'p';
  if (*joined == 0) return nullptr;
  session->rows.push_back(*std::exchange(session->beginning, std::nullopt));
  ++session->joined;
  return nullptr;
}
// First tokens come alone. Each row ends with its own or, if `endless`, never.
skd_status* skd_session_step(skd_session* session, skd_event* events, size_t /*capacity*/, size_t* count) {
  if (engines_fail) return new skd_status{SKD_ERROR_INTERNAL};
  const size_t joined = std::exchange(session->joined, 0);
  const size_t first = joined > 0 ? session->rows.size() - joined : 0;
  *count = session->rows.size() - first;
  for (size_t i = 0; i < *count; ++i) {
    events[i] = {session->rows[first + i] + (row_lost ? 1000U : 0U), token, 1, joined > 0 ? 1U : 0U,
                 endless ? SKD_FINISH_NONE : SKD_FINISH_STOP};
  }
  if (*count > 0) calls += joined > 0 ? 'f' : 'd';
  if (endless) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } else {
    session->rows.clear();
  }
  return nullptr;
}
skd_status* skd_session_cancel(skd_session* session, uint64_t row) {
  if (session->beginning == row) {
    session->beginning.reset();
  } else {
    session->rows.erase(std::find(session->rows.begin(), session->rows.end(), row));
  }
  return nullptr;
}
skd_status* skd_tokenizer_create(const skd_bundle* /*bundle*/, const char* /*library*/, skd_tokenizer** tokenizer) {
  *tokenizer = new skd_tokenizer;
  return nullptr;
}
// Each id is a byte; 0x80 and above are not characters.
skd_status* skd_tokenizer_decode(skd_tokenizer* /*tokenizer*/, const int64_t* ids, size_t count, char** text, size_t* length) {
  num_decoded_ids += count;
  std::string found;
  for (const int64_t* id = ids; id != ids + count; ++id)
    found += *id < 0x80 ? std::string(1, static_cast<char>(*id)) : "\xEF\xBF\xBD";
  *text = static_cast<char*>(std::malloc(found.size() + 1));
  std::copy_n(found.c_str(), found.size() + 1, *text);
  *length = found.size();
  return nullptr;
}
// Each byte is an id.
skd_status* skd_tokenizer_encode(skd_tokenizer* /*tokenizer*/, const char* text, int64_t** ids, size_t* count) {
  *count = std::string(text).size();
  *ids = static_cast<int64_t*>(std::malloc((*count + 1) * sizeof(int64_t)));
  std::copy_n(text, *count, *ids);
  return nullptr;
}
void skd_tokenizer_destroy(skd_tokenizer* tokenizer) { delete tokenizer; }
void skd_free(void* memory) { std::free(memory); }

}  // extern "C"

namespace {

// Whether a condition comes to hold within ten seconds.
template <typename Holds>
bool WaitUntil(const Holds& holds) {
  for (int look = 0; look < 1000 && !holds(); ++look) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return holds();
}

class Requests {
 public:
  explicit Requests(uint32_t rows = 1) {
    slow_session = no_memory = gpu_lost = engines_fail = row_lost = endless = false;
    add_fails = part_fails = SKD_OK;
    prompt_parts = 1;
    token = 7;
    generator_rows.clear();
    calls.clear();
    most_sessions = sessions.load();
    skd_session_options room = skipdecode::SessionOptions();
    room.max_rows = rows;
    batcher_ = std::make_unique<service::Batcher>(bundle_, room, 8, &metrics);
  }
  // The status that a client gets.
  int Ask() {
    const auto request = Make();
    if (!Submit(*request)) return 429;
    try {
      request->WaitForFirstNews([] { return false; });
    } catch (const service::HttpError& error) {
      return error.status();
    }
    return 200;
  }

  std::unique_ptr<service::ActiveRequest> Make(size_t prompts = 1, std::chrono::seconds patience = std::chrono::seconds(20),
                                               std::chrono::seconds age = std::chrono::seconds(0)) {
    service::Completion completion{};
    completion.prompts.assign(prompts, {1, 2, 3});
    completion.gives_ids = true;
    completion.stream = streams;
    const auto now = service::Clock::now();
    return std::make_unique<service::ActiveRequest>(completion, nullptr, now - age, now + patience, &active_requests_);
  }
  bool Submit(const service::ActiveRequest& request) { return batcher_->Submit(request.rows()); }
  bool failing() const { return batcher_->failing(); }
  // Whether failing() becomes this value within ten seconds.
  bool WaitForFailing(bool failing) const {
    return WaitUntil([&] { return batcher_->failing() == failing; });
  }

  // Wait for the batcher's thread, which counts a row as ended only after its client has the last token.
  void WaitForBatcher() { batcher_.reset(); }

  service::Metrics metrics;
  bool streams = false;

 private:
  const skipdecode::Bundle bundle_ = skipdecode::Bundle::Load("");
  std::atomic<int> active_requests_{0};
  std::unique_ptr<service::Batcher> batcher_;
};

// Whether a number becomes a value within ten seconds.
template <typename Number>
bool WaitForValue(const std::atomic<Number>& metric, Number value) {
  return WaitUntil([&] { return metric == value; });
}

// The calls, without repeated steps.
std::string Order() {
  std::string order;
  for (const char call : calls) {
    if (call != 'd' || order.back() != 'd') order += call;
  }
  return order;
}

// The next piece of a stream that is not empty.
std::string NextNonEmptyPiece(service::ActiveRequest& request) {
  std::string piece;
  while (piece.empty()) piece = request.NextPiece();
  return piece;
}

}  // namespace

TEST_CASE("failing engines end their rows, and a new session serves the next ones, with never two sessions at a time") {
  Requests requests;
  CHECK(requests.Ask() == 200);
  engines_fail = true;
  CHECK(requests.Ask() == 500);
  CHECK(requests.Ask() == 500);
  engines_fail = false;
  CHECK(requests.Ask() == 200);
  requests.WaitForBatcher();
  CHECK(most_sessions == 1);
  CHECK(requests.metrics.failed == 2);
  CHECK(requests.metrics.running == 0);
}

TEST_CASE("while there is no memory for a session, requests are refused, and they are served once there is") {
  Requests requests;
  engines_fail = true;
  no_memory = true;
  CHECK(requests.Ask() == 500);
  CHECK(requests.Ask() == 503);
  CHECK(requests.Ask() == 503);
  engines_fail = false;
  no_memory = false;
  CHECK(requests.Ask() == 200);
  CHECK(requests.WaitForFailing(false));
}

TEST_CASE("while no session can be created, answers and the service's health say so, until one can") {
  Requests requests;
  engines_fail = true;
  gpu_lost = true;
  CHECK(requests.Ask() == 500);
  CHECK(requests.WaitForFailing(true));  // without a request
  const auto request = requests.Make();
  REQUIRE(requests.Submit(*request));
  CHECK_THROWS_WITH(request->WaitForFirstNews([] { return false; }),
                    "the engines cannot decode: the server retries every second, restart it if this lasts");
  CHECK(requests.WaitForFailing(true));
  CHECK(requests.Ask() == 500);
  engines_fail = false;
  gpu_lost = false;
  CHECK(requests.WaitForFailing(false));  // without a request
  CHECK(requests.Ask() == 200);
}

TEST_CASE("a session survives a row that there was no memory for, but no other failure to join") {
  for (const auto& [failing, code, status, kept] :
       {std::tuple(&add_fails, SKD_ERROR_CAPACITY, 503, true), std::tuple(&add_fails, SKD_ERROR_INTERNAL, 500, false),
        std::tuple(&part_fails, SKD_ERROR_CAPACITY, 503, true), std::tuple(&part_fails, SKD_ERROR_INTERNAL, 500, false)}) {
    Requests requests(2);
    requests.streams = true;
    endless = true;
    const auto before = requests.Make();
    REQUIRE(requests.Submit(*before));
    before->WaitForFirstNews([] { return false; });
    const int made = sessions_made;
    *failing = code;
    CHECK(requests.Ask() == status);
    *failing = SKD_OK;
    CHECK(WaitForValue(requests.metrics.failed, uint64_t{kept ? 1U : 2U}));
    NextNonEmptyPiece(*before);                      // what came with the answer's head
    std::string piece = NextNonEmptyPiece(*before);  // all that came until now; what comes next was made after the refusal
    if (kept) piece = NextNonEmptyPiece(*before);
    CHECK_THAT(piece, Catch::Contains(kept ? R"("token_ids":[7)" : "data: [DONE]"));
    CHECK(before->Ended() == !kept);
    CHECK(WaitForValue(sessions_made, made + (kept ? 0 : 1)));
  }
}

TEST_CASE("the service is healthy while a session is created, and a lost one is replaced even without a request") {
  Requests requests;
  const int made = sessions_made;
  slow_session = true;
  engines_fail = true;
  CHECK(requests.Ask() == 500);
  engines_fail = false;
  while (sessions_made == made) {
    REQUIRE_FALSE(requests.failing());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST_CASE("a stop string in the text that failing engines leave behind completes the answer") {
  const auto bundle = skipdecode::Bundle::Load("");
  skipdecode::Tokenizer tokenizer(bundle);
  Requests requests;
  endless = true;
  token = 0x80;  // held back, because it may become a character
  service::Completion completion{};
  completion.prompts = {{1, 2, 3}};
  completion.stops = {"\xEF\xBF\xBD"};
  std::atomic<int> active_requests{0};
  const auto now = service::Clock::now();
  service::ActiveRequest request(completion, &tokenizer, now, now + std::chrono::seconds(20), &active_requests);
  REQUIRE(requests.Submit(request));
  while (requests.metrics.tokens == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  engines_fail = true;
  REQUIRE(WaitForValue(requests.metrics.failed, uint64_t{1}));
  requests.WaitForBatcher();
  CHECK_NOTHROW(request.WaitForFirstNews([] { return false; }));
  CHECK_THAT(request.NextPiece(), Catch::Contains(R"("finish_reason":"stop")"));
}

TEST_CASE("seconds to the first token count from the request's arrival, not from when its row was created") {
  Requests requests;
  const auto request = requests.Make(1, std::chrono::seconds(20), std::chrono::seconds(5));
  REQUIRE(requests.Submit(*request));
  request->WaitForFirstNews([] { return false; });
  requests.WaitForBatcher();
  CHECK(requests.metrics.first_token_sum_us > 5'000'000);
}

TEST_CASE("a row that the batcher does not know ends the session and nothing else") {
  Requests requests;
  row_lost = true;
  CHECK(requests.Ask() == 500);
  row_lost = false;
  CHECK(requests.Ask() == 200);
}

TEST_CASE("rows of a request are numbered as in skd_generate, so that equal prompts are sampled differently") {
  Requests requests;
  const auto request = requests.Make(3);
  REQUIRE(requests.Submit(*request));
  while (!request->Ended()) request->NextPiece();
  requests.WaitForBatcher();
  CHECK(generator_rows == std::vector<uint32_t>{0, 1, 2});
}

TEST_CASE("rows of a request start together where nobody waits for them, and otherwise with steps in between") {
  Requests requests(6);
  endless = true;
  prompt_parts = 2;
  std::vector<std::unique_ptr<service::ActiveRequest>> asked;
  for (const size_t prompts : {3, 1, 2}) {
    asked.push_back(requests.Make(prompts));
    REQUIRE(requests.Submit(*asked.back()));
  }
  REQUIRE(WaitUntil([&] { return requests.metrics.running == 6; }));
  for (const auto& request : asked) {
    for (const auto& row : request->rows()) row->Cancel();
  }
  requests.WaitForBatcher();
  const std::string order = Order();
  CHECK(order.substr(0, 8) == "papapafd");
  CHECK(order.substr(8, 12) == "pdafdpdafdpd");
}

TEST_CASE("a request with more prompts than places starts with all of them, and its other rows then step while prompts run") {
  Requests requests(2);
  endless = true;
  prompt_parts = 2;
  const auto request = requests.Make(3);
  REQUIRE(requests.Submit(*request));
  REQUIRE(WaitUntil([&] { return requests.metrics.tokens >= 4; }));
  request->rows()[0]->Cancel();
  REQUIRE(WaitForValue(requests.metrics.queued, uint64_t{0}));
  for (const auto& row : request->rows()) row->Cancel();
  requests.WaitForBatcher();
  CHECK(Order().substr(0, 8) == "papafdpd");
}

TEST_CASE("a row that is cancelled, or out of time, while its prompt runs frees its place, and the others go on") {
  for (const bool cancelled : {true, false}) {
    Requests requests(2);
    endless = true;
    const auto runs = requests.Make();
    REQUIRE(requests.Submit(*runs));
    REQUIRE(WaitForValue(requests.metrics.running, uint64_t{1}));
    prompt_parts = 1'000'000;
    const auto begins = requests.Make(1, std::chrono::seconds(cancelled ? 20 : 1));
    REQUIRE(requests.Submit(*begins));
    REQUIRE(WaitForValue(requests.metrics.running, uint64_t{2}));
    prompt_parts = 1;
    const auto waits = requests.Make();
    REQUIRE(requests.Submit(*waits));
    if (cancelled) begins->rows().front()->Cancel();
    waits->WaitForFirstNews([] { return false; });
    CHECK((cancelled ? requests.metrics.cancelled : requests.metrics.timed_out) == 1);
    CHECK(requests.metrics.failed == 0);
    CHECK(requests.metrics.running == 2);
    for (const auto* request : {runs.get(), waits.get()}) request->rows().front()->Cancel();
    requests.WaitForBatcher();
  }
}

TEST_CASE("a client that goes away before its first token leaves the queue, however long the rows ahead take") {
  Requests requests;
  endless = true;
  auto runs = requests.Make(), waits = requests.Make();
  REQUIRE(requests.Submit(*runs));
  REQUIRE(WaitForValue(requests.metrics.running, uint64_t{1}));
  REQUIRE(requests.Submit(*waits));
  CHECK_THROWS_AS(waits->WaitForFirstNews([] { return true; }), service::HttpError);
  CHECK(requests.metrics.queued == 1);
  waits.reset();
  CHECK(WaitForValue(requests.metrics.queued, uint64_t{0}));
  CHECK(requests.metrics.cancelled == 1);
  CHECK(requests.metrics.running == 1);
  runs.reset();
  requests.WaitForBatcher();
  CHECK(requests.metrics.cancelled == 2);
}

TEST_CASE("a row that a stop string ended is complete, not cancelled") {
  Requests requests;
  endless = true;
  auto request = requests.Make();
  REQUIRE(requests.Submit(*request));
  REQUIRE(WaitForValue(requests.metrics.running, uint64_t{1}));
  request->rows().front()->Complete();
  request.reset();
  requests.WaitForBatcher();
  CHECK(requests.metrics.completed == 1);
  CHECK(requests.metrics.cancelled == 0);
}

TEST_CASE("a row that decodes for too long ends with the text it has and says that it ran out of time") {
  Requests requests;
  endless = true;
  auto request = requests.Make(1, std::chrono::seconds(1));
  REQUIRE(requests.Submit(*request));
  request->WaitForFirstNews([] { return false; });
  std::string whole;
  while (!request->Ended()) whole = request->NextPiece();
  CHECK_THAT(whole, Catch::Contains(R"("finish_reason":"timeout")") && Catch::Contains(R"("token_ids":[7,)"));
  request.reset();
  requests.WaitForBatcher();
  CHECK(requests.metrics.timed_out == 1);
  CHECK(requests.metrics.cancelled == 0);
  CHECK(requests.metrics.running == 0);
}

TEST_CASE("rows are counted, not requests, including those that the queue has no room for") {
  Requests requests;
  CHECK_FALSE(requests.Submit(*requests.Make(9)));  // the queue holds 8
  const auto request = requests.Make(8);
  REQUIRE(requests.Submit(*request));
  while (!request->Ended()) request->NextPiece();
  requests.WaitForBatcher();
  CHECK(requests.metrics.rejected == 9);
  CHECK(requests.metrics.accepted == 8);
  CHECK(requests.metrics.tokens == 8);
  CHECK(requests.metrics.completed == 8);
}

TEST_CASE("sums of seconds are reported to the microsecond") {
  service::Metrics metrics;
  metrics.first_token_sum_us = 1'234'567'890'123;
  CHECK_THAT(metrics.Text(), Catch::Contains("first_token_seconds_sum 1234567.890123\n"));
  CHECK_THAT(metrics.Text(), Catch::Contains("{le=\"0.01\"}") && Catch::Contains("{le=\"0.3\"}"));
}

TEST_CASE("a text with ids that the model has no weights for is the client's mistake") {
  const auto bundle = skipdecode::Bundle::Load("");
  skipdecode::Tokenizer tokenizer(bundle);
  const service::Limits limits{8, 8, 8, /*vocab_size=*/100, /*max_prompt_bytes=*/8};
  CHECK(service::ParseCompletion(R"({"prompt": "ABc"})", "m", limits, &tokenizer).prompts.front().back() == 'c');
  CHECK_THROWS_WITH(service::ParseCompletion(R"({"prompt": "ABd"})", "m", limits, &tokenizer),
                    "token id 100 of the prompt's text is outside the vocabulary");
}

TEST_CASE("a text of more bytes than the server takes is refused before it is tokenised") {
  const auto bundle = skipdecode::Bundle::Load("");
  skipdecode::Tokenizer tokenizer(bundle);
  const service::Limits limits{8, 8, 8, /*vocab_size=*/100, /*max_prompt_bytes=*/3};
  CHECK(service::ParseCompletion(R"({"prompt": "ABc"})", "m", limits, &tokenizer).prompts.size() == 1);
  CHECK_THROWS_WITH(service::ParseCompletion(R"({"prompt": "ABcd"})", "m", limits, &tokenizer),  // its d would be refused
                    "prompt has 4 bytes, this server takes 3");
}

TEST_CASE("a text stream starts afresh after its end") {
  const auto bundle = skipdecode::Bundle::Load("");
  skipdecode::Tokenizer tokenizer(bundle);
  skipdecode::TextStream stream(tokenizer);
  for (int token = 0; token < 1000; ++token) CHECK(stream.Add(0x80).empty());
  CHECK(stream.End().size() == 3000);
  CHECK(stream.Add('a') == "a");
}

TEST_CASE("streaming costs time linear in the text, even where nothing can be given yet") {
  const auto bundle = skipdecode::Bundle::Load("");
  skipdecode::Tokenizer tokenizer(bundle);
  skipdecode::TextStream stream(tokenizer);
  std::string streamed, wanted;
  num_decoded_ids = 0;
  for (int64_t token = 0; token < 4000; ++token) {
    streamed += stream.Add(0x80);
    wanted += "\xEF\xBF\xBD";
  }
  CHECK(num_decoded_ids < 4000 * 100);  // 4000 * 4000 / 2 if each token decoded the whole text
  for (const char* letter = "And then there was text again."; *letter != 0; ++letter) {
    for (int repeat = 0; repeat < 10; ++repeat) {
      streamed += stream.Add(*letter);
      wanted += *letter;
    }
  }
  CHECK(streamed.size() > 4000 * 3);
  CHECK(streamed + stream.End() == wanted);
}
