// Sessions through the public header only. SKD_TEST_BUNDLE and SKD_TEST_ABSOLUTE_BUNDLE name bundles of a small model.
// SKD_TEST_HYBRID_BUNDLE and SKD_TEST_ABSOLUTE_HYBRID_BUNDLE name bundles of models with both attention and linear attention.
#include <sys/resource.h>

#include <cstdlib>
#include <map>
#include <skipdecode/skipdecode.hpp>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.h"
#include "session_helpers.h"

namespace {

constexpr const char* kBundles[] = {"SKD_TEST_BUNDLE", "SKD_TEST_ABSOLUTE_BUNDLE", "SKD_TEST_HYBRID_BUNDLE",
                                    "SKD_TEST_ABSOLUTE_HYBRID_BUNDLE"};

// Rows of one session: the tokens that they get, and those that they get alone.
class Rows {
 public:
  explicit Rows(const char* variable) : bundle_(Bundle(variable)), session_(bundle_, Room(4)) {}

  void Add(size_t prompt, uint32_t length, uint64_t seed) {
    const skd_row_options options = Options(length, seed);
    wanted[session_.Add(kPrompts[prompt], options)] = TokensAlone(bundle_, kPrompts[prompt], options);
  }
  // With a step of the other rows between two parts; returns how many parts there were.
  int AddInParts(size_t prompt, uint32_t length, uint64_t seed) {
    const skd_row_options options = Options(length, seed);
    const uint64_t row = session_.Begin(kPrompts[prompt], options);
    wanted[row] = TokensAlone(bundle_, kPrompts[prompt], options);
    int parts = 1;
    for (; !session_.Prefill(1); ++parts) {
      Step(1);
      CHECK(found.count(row) == 0);
    }
    return parts;
  }
  void Step(int count) {
    for (int i = 0; i < count; ++i) AppendTokens(session_.Step(), &found);
  }
  void StepToEnd() {
    while (AppendTokens(session_.Step(), &found) > 0) {
    }
  }

  std::map<uint64_t, Tokens> found, wanted;

 private:
  const skipdecode::Bundle& bundle_;
  skipdecode::Session session_;
};

int64_t MostResidentKiB() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return used.ru_maxrss;
}

}  // namespace

TEST_CASE("rows that join and leave at any time get the same tokens as alone") {
  for (const char* variable : kBundles) {
    INFO(variable);
    Rows rows(variable);
    rows.Add(1, 20, 0);
    rows.Step(4);
    rows.Add(0, 9, 7);
    rows.Add(2, 3, 0);
    rows.Step(3);
    rows.Add(3, 16, 3);
    rows.Step(1);
    rows.Add(2, 12, 0);  // takes the place of the row that ended
    rows.StepToEnd();
    REQUIRE(rows.found == rows.wanted);
  }
}

TEST_CASE("a row whose prompt runs in parts gets the same tokens as alone, and so do the rows that step meanwhile") {
  for (const char* variable : kBundles) {
    INFO(variable);
    Rows rows(variable);
    rows.AddInParts(1, 20, 0);
    CHECK(rows.AddInParts(0, 9, 7) > 2);  // the first of these rows steps between the parts
    rows.AddInParts(2, 3, 0);             // and so on; rows may end, so that this one joins at another place than it waited at
    rows.Step(3);
    rows.Add(3, 16, 3);
    rows.Step(5);
    rows.AddInParts(2, 12, 0);
    rows.StepToEnd();
    REQUIRE(rows.found == rows.wanted);
  }
}

TEST_CASE("with anchor absolute a prompt in parts waits next to the last place, and runs at once where that is taken") {
  for (const char* variable : kBundles) {
    INFO(variable);
    Rows rows(variable);
    for (const size_t prompt : {1U, 2U, 3U}) rows.Add(prompt, 9, 0);
    rows.Step(2);
    const bool absolute = std::string(variable).find("ABSOLUTE") != std::string::npos;
    CHECK((rows.AddInParts(0, 9, 0) == 1) == absolute);
    rows.StepToEnd();
    REQUIRE(rows.found == rows.wanted);
  }
}

TEST_CASE("while a prompt runs in parts no other can start, and when it is cancelled its place is free") {
  const skipdecode::Bundle& bundle = Bundle();
  skipdecode::Session session(bundle, Room(2));
  std::map<uint64_t, Tokens> found;
  CHECK(session.Prefill(1));  // nothing has begun
  const uint64_t stays = session.Add(kPrompts[0], Options(15));
  const uint64_t leaves = session.Begin(kPrompts[1], Options(15));
  const auto busy = Catch::Equals("prompt: another prompt has begun; run its parts first");
  CHECK_THROWS_WITH(session.Add(kPrompts[2], Options(5)), busy);
  CHECK_THROWS_WITH(session.Begin(kPrompts[2], Options(5)), busy);
  CHECK_THROWS_WITH(session.Logits(leaves), Catch::Contains("is not in this session"));
  CHECK_FALSE(session.Prefill(1));
  for (int i = 0; i < 3; ++i) AppendTokens(session.Step(), &found);
  session.Cancel(leaves);
  CHECK_THROWS_WITH(session.Cancel(leaves), Catch::Contains("is not in this session"));
  const uint64_t joins = session.Add(kPrompts[2], Options(10));
  while (AppendTokens(session.Step(), &found) > 0) {
  }
  CHECK(found == std::map<uint64_t, Tokens>{{stays, TokensAlone(bundle, kPrompts[0], Options(15))},
                                            {joins, TokensAlone(bundle, kPrompts[2], Options(10))}});
}

TEST_CASE("a cancelled row frees its place, and the others go on as before") {
  const skipdecode::Bundle& bundle = Bundle();
  skipdecode::Session session(bundle, Room(2));
  std::map<uint64_t, Tokens> found;
  const uint64_t stays = session.Add(kPrompts[0], Options(15));
  const uint64_t leaves = session.Add(kPrompts[1], Options(15));
  REQUIRE_THROWS_WITH(session.Add(kPrompts[2], Options(5)), Catch::Contains("all 2 rows are in use; wait until one ends"));
  for (int i = 0; i < 5; ++i) AppendTokens(session.Step(), &found);
  session.Cancel(leaves);
  REQUIRE_THROWS_WITH(session.Cancel(leaves), Catch::Contains("is not in this session"));
  const uint64_t joins = session.Add(kPrompts[2], Options(10));
  for (auto events = session.Step(); !events.empty(); events = session.Step()) AppendTokens(events, &found);
  REQUIRE(found[stays] == TokensAlone(bundle, kPrompts[0], Options(15)));
  REQUIRE(found[joins] == TokensAlone(bundle, kPrompts[2], Options(10)));
  REQUIRE(found[leaves].size() == 5);
}

TEST_CASE("sessions of one bundle run concurrently on separate threads") {
  const skipdecode::Bundle& bundle = Bundle();
  std::vector<Tokens> wanted, found(8);
  for (size_t i = 0; i < found.size(); ++i) wanted.push_back(TokensAlone(bundle, kPrompts[i % 4], Options(12, i)));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < found.size(); ++i) {
    threads.emplace_back([&, i] { found[i] = TokensAlone(bundle, kPrompts[i % 4], Options(12, i)); });
  }
  for (std::thread& thread : threads) thread.join();
  REQUIRE(found == wanted);
}

TEST_CASE("a callback that returns false ends its row, and one that throws is rethrown") {
  std::map<uint64_t, int> count;
  skipdecode::Generate(Bundle(), {kPrompts[0], kPrompts[1]}, Options(10),
                       [&](const skd_event& event) { return ++count[event.row] < 3 || event.row == 1; });
  REQUIRE(count == std::map<uint64_t, int>{{0, 3}, {1, 10}});
  REQUIRE_THROWS_AS(skipdecode::Generate(Bundle(), {kPrompts[0]}, Options(10),
                                         [](const skd_event&) -> bool { throw std::logic_error("mine"); }),
                    std::logic_error);
}

TEST_CASE("a session may outlive the handle of its bundle") {
  std::unique_ptr<skipdecode::Session> session;
  {
    const auto bundle = skipdecode::Bundle::Load(std::getenv("SKD_TEST_BUNDLE"));
    session = std::make_unique<skipdecode::Session>(bundle, Room(1));
  }
  session->Add(kPrompts[0], Options(3));
  REQUIRE(session->Step().size() == 1);
}

TEST_CASE("a text stream cannot be created from a temporary tokenizer") {
  STATIC_REQUIRE(std::is_constructible_v<skipdecode::TextStream, const skipdecode::Tokenizer&>);
  STATIC_REQUIRE_FALSE(std::is_constructible_v<skipdecode::TextStream, skipdecode::Tokenizer>);
}

TEST_CASE("counters count steps, tokens and memory") {
  skipdecode::Session session(Bundle(), Room(2));
  session.Add(kPrompts[0], Options(4));
  session.Add(kPrompts[1], Options(2));
  while (!session.Step().empty()) {
  }
  const skd_counters counters = session.counters();
  REQUIRE(counters.tokens == 6);
  REQUIRE(counters.decode_steps == 3);
  REQUIRE(counters.decode_ns >= counters.decode_engine_ns);
  REQUIRE(counters.decode_engine_ns > 0);
  REQUIRE(counters.kv_bytes > 0);
}

TEST_CASE("a request that does not fit is refused with a line, and the session goes on") {
  const skipdecode::Bundle& bundle = Bundle();
  REQUIRE_THROWS_WITH(skipdecode::Session(bundle, Room(99)), Catch::Contains("99 rows: the bundle takes 1..4"));
  REQUIRE_THROWS_WITH(skipdecode::Session(bundle, Room(0)),
                      Catch::Equals("max_rows: 0 rows: the bundle takes 1..4; choose 1 or more"));
  skd_session_options long_answers = Room(1);
  long_answers.max_new_tokens = 30;
  REQUIRE_THROWS_WITH(
      skipdecode::Session(bundle, long_answers),
      Catch::Equals("max_new_tokens: 30 new tokens: prompts leave 24; choose fewer, max_prompt_tokens up to 18, or "
                    "export with a larger --max-length"));
  const int64_t before = MostResidentKiB();
  REQUIRE_THROWS_WITH(skipdecode::Session(bundle, Room(100'000'000)), Catch::Contains("100000000 rows: the bundle takes 1..4"));
  REQUIRE(MostResidentKiB() - before < 100'000);
  REQUIRE_THROWS_WITH(skipdecode::Generate(bundle, {}, Options(3), [](const skd_event&) { return true; }),
                      Catch::Equals("there is no prompt; give at least one"));
  skipdecode::Session session(bundle, Room(1));
  REQUIRE_THROWS_WITH(session.Add({}, Options(3)), Catch::Contains("is empty; give at least one token"));
  REQUIRE_THROWS_WITH(session.Add({99}, Options(3)),
                      Catch::Contains("token id 99 is outside the vocabulary; give ids from 0 to 98"));
  REQUIRE_THROWS_WITH(session.Add({-1}, Options(3)), Catch::Contains("token id -1"));
  REQUIRE_THROWS_WITH(session.Add(Tokens(40, 5), Options(3)), Catch::Contains("40 tokens: the session takes 24"));
  REQUIRE_THROWS_WITH(session.Add({5}, Options(0)), Catch::Contains("0 new tokens: the session takes 1..24"));
  skd_row_options cold = Options(3, 1);
  cold.temperature = 0;
  REQUIRE_THROWS_WITH(session.Add({5}, cold), Catch::Contains("choose a number above 0"));
  cold.temperature = 1;
  cold.top_p = 1.0000001;
  REQUIRE_THROWS_WITH(session.Add({5}, cold), Catch::Equals("top_p: 1.0000001 is out of range; choose a number in (0, 1]"));
  REQUIRE_THROWS_WITH(session.Logits(0), Catch::Contains("row 0 is not in this session"));
  session.Add({5}, Options(3));
  REQUIRE(session.Step().size() == 1);
}

TEST_CASE("skd_generate refuses lengths that no session takes, whatever their sum") {
  const auto generate = [](size_t length, uint32_t max_new_tokens) {
    const int64_t id = 5;
    const skd_row_options options = Options(max_new_tokens);
    const skd_callback ignore = [](void*, const skd_event*) { return 0; };
    return CodeAndMessage(skd_generate(Bundle().get(), &id, &length, 1, &options, 0, ignore, nullptr));
  };
  CHECK(generate(1, 0).second == "0 new tokens: the bundle takes 1 or more; choose another skd_row_options.max_new_tokens");
  CHECK_THAT(generate(SIZE_MAX, 1).second, Catch::Contains("18446744073709551615 tokens and 1 new ones exceed the bundle's"));
  CHECK_THAT(generate(SIZE_MAX - 1, UINT32_MAX).second,
             Catch::Contains("18446744073709551614 tokens and 4294967295 new ones exceed"));
  CHECK(generate(1, 1).first == SKD_OK);
}

TEST_CASE("error lines are UTF-8, whatever bytes a path has") {
  skd_bundle* bundle = nullptr;
  CHECK(CodeAndMessage(skd_bundle_load("no\nwh\xff\xc3re/\xc3\xa9", nullptr, &bundle)).second ==
        "no wh\xEF\xBF\xBD\xEF\xBF\xBDre/\xc3\xa9: there is no bundle.json here; name the folder that skip-export wrote");
}

TEST_CASE("mistakes at the C interface are statuses") {
  skd_session* session = nullptr;
  REQUIRE(CodeAndMessage(skd_session_create(nullptr, nullptr, &session)) ==
          std::pair(SKD_ERROR_ARGUMENT, std::string("bundle or session is NULL; see skipdecode.h")));
  skd_session_options wrong = skd_session_options_default();
  wrong.struct_size = 4096;
  REQUIRE(CodeAndMessage(skd_session_create(Bundle().get(), &wrong, &session)).second ==
          "struct_size is wrong; see skipdecode.h");
  CHECK(CodeAndMessage(skd_bundle_get_info(Bundle().get(), nullptr)) ==
        std::pair(SKD_ERROR_ARGUMENT, std::string("bundle or info is NULL; see skipdecode.h")));
  wrong.struct_size = sizeof wrong.struct_size + sizeof wrong.max_rows;  // as from a caller that knows fewer fields
  REQUIRE(skd_session_create(Bundle().get(), &wrong, &session) == nullptr);
  CHECK(CodeAndMessage(skd_session_get_counters(session, nullptr)) ==
        std::pair(SKD_ERROR_ARGUMENT, std::string("session or counters is NULL; see skipdecode.h")));
  skd_session_destroy(session);
  skd_session_destroy(nullptr);
  skd_bundle_destroy(nullptr);
  skd_tokenizer_destroy(nullptr);
  skd_status_destroy(nullptr);
  skd_free(nullptr);
}
