// The service's batcher when sessions fail.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <tuple>

#include "catch.h"
#include "requests.h"

TEST_CASE("failing engines end their rows, and a new session serves the next ones, with never two sessions at a time") {
  Requests requests;
  CHECK(requests.Ask() == 200);
  library.engines_fail = true;
  CHECK(requests.Ask() == 500);
  CHECK(requests.Ask() == 500);
  library.engines_fail = false;
  CHECK(requests.Ask() == 200);
  requests.WaitForBatcher();
  CHECK(library.most_sessions == 1);
  CHECK(requests.metrics.failed == 2);
  CHECK(requests.metrics.running == 0);
}

TEST_CASE("while there is no memory for a session, requests are refused, and they are served once there is") {
  Requests requests;
  library.engines_fail = true;
  library.no_memory = true;
  CHECK(requests.Ask() == 500);
  CHECK(requests.Ask() == 503);
  CHECK(requests.Ask() == 503);
  library.engines_fail = false;
  library.no_memory = false;
  CHECK(requests.Ask() == 200);
  CHECK(requests.WaitForFailing(false));
}

TEST_CASE("while no session can be created, answers and the service's health say so, until one can") {
  Requests requests;
  library.engines_fail = true;
  library.gpu_lost = true;
  CHECK(requests.Ask() == 500);
  CHECK(requests.WaitForFailing(true));  // without a request
  const auto request = requests.Make();
  REQUIRE(requests.Submit(*request));
  CHECK_THROWS_WITH(request->WaitForFirstNews([] { return false; }),
                    "the engines cannot decode: the server retries every second, restart it if this lasts");
  CHECK(requests.WaitForFailing(true));
  CHECK(requests.Ask() == 500);
  library.engines_fail = false;
  library.gpu_lost = false;
  CHECK(requests.WaitForFailing(false));  // without a request
  CHECK(requests.Ask() == 200);
}

TEST_CASE("a session survives a row that there was no memory for, but no other failure to join") {
  for (const auto& [failing, code, status, kept] : {std::tuple(&library.begin_fails, SKD_ERROR_CAPACITY, 503, true),
                                                    std::tuple(&library.begin_fails, SKD_ERROR_INTERNAL, 500, false),
                                                    std::tuple(&library.part_fails, SKD_ERROR_CAPACITY, 503, true),
                                                    std::tuple(&library.part_fails, SKD_ERROR_INTERNAL, 500, false)}) {
    Requests requests(2);
    requests.streams = true;
    library.endless = true;
    const auto before = requests.Make();
    REQUIRE(requests.Submit(*before));
    before->WaitForFirstNews([] { return false; });
    const int made = library.sessions_made;
    *failing = code;
    CHECK(requests.Ask() == status);
    *failing = SKD_OK;
    CHECK(WaitForValue(requests.metrics.failed, uint64_t{kept ? 1U : 2U}));
    NextNonEmptyPiece(*before);                      // what came with the answer's head
    std::string piece = NextNonEmptyPiece(*before);  // all that came until now; what comes next was made after the refusal
    if (kept) piece = NextNonEmptyPiece(*before);
    CHECK_THAT(piece, Catch::Contains(kept ? R"("token_ids":[7)" : "data: [DONE]"));
    CHECK(before->Ended() == !kept);
    CHECK(WaitForValue(library.sessions_made, made + (kept ? 0 : 1)));
    CHECK(requests.Ask() == 200);  // nothing is left of the row that failed
  }
}

TEST_CASE("the service is healthy while a session is created, and a lost one is replaced even without a request") {
  Requests requests;
  const int made = library.sessions_made;
  library.slow_session = true;
  library.engines_fail = true;
  CHECK(requests.Ask() == 500);
  library.engines_fail = false;
  while (library.sessions_made == made) {
    REQUIRE_FALSE(requests.failing());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST_CASE("a stop string in the text that failing engines leave behind completes the answer") {
  const auto bundle = skipdecode::Bundle::Load("");
  skipdecode::Tokenizer tokenizer(bundle);
  Requests requests;
  library.endless = true;
  library.token = 0x80;  // held back, because it may become a character
  service::Completion completion{};
  completion.prompts = {{1, 2, 3}};
  completion.stops = {"\xEF\xBF\xBD"};
  std::atomic<int> active_requests{0};
  const auto now = service::Clock::now();
  service::ActiveRequest request(completion, &tokenizer, now, now + std::chrono::seconds(20), &active_requests);
  REQUIRE(requests.Submit(request));
  while (requests.metrics.tokens == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  library.engines_fail = true;
  REQUIRE(WaitForValue(requests.metrics.failed, uint64_t{1}));
  requests.WaitForBatcher();
  CHECK_NOTHROW(request.WaitForFirstNews([] { return false; }));
  CHECK_THAT(request.NextPiece(), Catch::Contains(R"("finish_reason":"stop")"));
}

TEST_CASE("a row that the batcher does not know ends the session and nothing else") {
  Requests requests;
  library.row_lost = true;
  CHECK(requests.Ask() == 500);
  library.row_lost = false;
  CHECK(requests.Ask() == 200);
}
