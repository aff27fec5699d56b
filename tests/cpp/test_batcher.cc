// In which order the service's batcher starts rows and steps, whom it drops, and what it counts.
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "catch.h"
#include "requests.h"

TEST_CASE("seconds to the first token count from the request's arrival, not from when its row was created") {
  Requests requests;
  const auto request = requests.Make(1, std::chrono::seconds(20), std::chrono::seconds(5));
  REQUIRE(requests.Submit(*request));
  request->WaitForFirstNews([] { return false; });
  requests.WaitForBatcher();
  CHECK(requests.metrics.first_token_sum_us > 5'000'000);
}

TEST_CASE("rows of a request are numbered as in skd_generate, so that equal prompts are sampled differently") {
  Requests requests;
  const auto request = requests.Make(3);
  REQUIRE(requests.Submit(*request));
  while (!request->Ended()) request->NextPiece();
  requests.WaitForBatcher();
  CHECK(library.generator_rows == std::vector<uint32_t>{0, 1, 2});
}

TEST_CASE("rows of a request start together where nobody waits for them, and otherwise with steps in between") {
  Requests requests(6);
  library.endless = true;
  library.prompt_parts = 2;
  std::vector<std::unique_ptr<service::ActiveRequest>> asked;
  for (const size_t prompts : {3U, 1U, 2U}) {
    asked.push_back(requests.Make(prompts));
    REQUIRE(requests.Submit(*asked.back()));
  }
  REQUIRE(WaitUntil([&] { return requests.metrics.running == 6; }));
  for (const auto& request : asked) {
    for (const auto& row : request->rows()) row->Cancel();
  }
  requests.WaitForBatcher();
  const std::string order = library.Order();
  CHECK(order.substr(0, 10) == "pafpafpafd");
  CHECK(order.substr(10, 12) == "pdafdpdafdpd");
}

TEST_CASE("a request with more prompts than places starts with all of them, and its other rows then step while prompts run") {
  Requests requests(2);
  library.endless = true;
  library.prompt_parts = 2;
  const auto request = requests.Make(3);
  REQUIRE(requests.Submit(*request));
  REQUIRE(WaitUntil([&] { return requests.metrics.tokens >= 4; }));
  request->rows()[0]->Cancel();
  REQUIRE(WaitForValue(requests.metrics.queued, uint64_t{0}));
  for (const auto& row : request->rows()) row->Cancel();
  requests.WaitForBatcher();
  CHECK(library.Order().substr(0, 9) == "pafpafdpd");
}

TEST_CASE("of a request's prompts, only those that have run nothing run out of time, also if their client looks late") {
  for (const bool late : {false, true}) {
    Requests requests(4);
    library.part_ms = 1100;
    const auto request = requests.Make(3, std::chrono::seconds(2));
    REQUIRE(requests.Submit(*request));
    if (late) REQUIRE(WaitForValue(requests.metrics.timed_out, uint64_t{1}));
    CHECK_NOTHROW(request->WaitForFirstNews([] { return false; }));
    CHECK((requests.metrics.timed_out == 1) == late);
    std::string whole = request->NextPiece();
    while (!request->Ended()) whole = request->NextPiece();
    const auto answer = nlohmann::json::parse(whole);
    std::string reasons;
    for (const auto& choice : answer["choices"]) reasons += choice["finish_reason"].get<std::string>() + " ";
    CHECK(reasons == "stop stop timeout ");
  }
}

TEST_CASE("a row that is cancelled, or out of time, while its prompt runs frees its place, and the others go on") {
  for (const bool cancelled : {true, false}) {
    Requests requests(2);
    library.endless = true;
    const auto runs = requests.Make();
    REQUIRE(requests.Submit(*runs));
    REQUIRE(WaitForValue(requests.metrics.running, uint64_t{1}));
    library.prompt_parts = 1'000'000;
    const auto begins = requests.Make(1, std::chrono::seconds(cancelled ? 20 : 1));
    REQUIRE(requests.Submit(*begins));
    REQUIRE(WaitForValue(requests.metrics.running, uint64_t{2}));
    library.prompt_parts = 1;
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
  library.endless = true;
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
  library.endless = true;
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
  library.endless = true;
  const int made = library.sessions_made;
  auto request = requests.Make(1, std::chrono::seconds(1));
  REQUIRE(requests.Submit(*request));
  request->WaitForFirstNews([] { return false; });
  std::string whole;
  while (!request->Ended()) whole = request->NextPiece();
  CHECK_THAT(whole, Catch::Contains(R"("finish_reason":"timeout")") && Catch::Contains(R"("token_ids":[7,)"));
  request.reset();
  CHECK(requests.Ask() == 200);
  requests.WaitForBatcher();
  CHECK(requests.metrics.timed_out == 1);
  CHECK(requests.metrics.cancelled == 1);  // the second request, whose client has left
  CHECK(library.sessions_made == made);    // the session did not go on with the first one's row
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
