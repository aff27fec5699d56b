// Sessions at the limits of what they take, what they report of a row's first and last token, and edge cases of the C
// interface. SKD_TEST_BUNDLE has six layers and takes four rows of 48 tokens.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

#include "session_helpers.h"

namespace {

skd_session_options RoomFor(uint32_t prompt, uint32_t fresh) {
  skd_session_options options = Room(1);
  options.max_prompt_tokens = prompt;
  options.max_new_tokens = fresh;
  return options;
}

int CallsOf(const std::vector<Tokens>& prompts, const skd_row_options& options) {
  int calls = 0;
  skipdecode::Generate(Bundle(), prompts, options, [&calls](const skd_event&) { return ++calls > 0; });
  return calls;
}

}  // namespace

TEST_CASE("a session takes rows and tokens exactly up to its limits") {
  const skipdecode::Bundle& bundle = Bundle();
  CHECK_NOTHROW(skipdecode::Session(bundle, Room(4)));
  CHECK_THROWS_WITH(skipdecode::Session(bundle, Room(5)), Catch::Contains("5 rows: the bundle takes 1..4"));
  CHECK_NOTHROW(skipdecode::Session(bundle, RoomFor(47, 1)));
  CHECK_THROWS_WITH(skipdecode::Session(bundle, RoomFor(48, 0)), Catch::Contains("48 prompt tokens leave no room"));
  CHECK_NOTHROW(skipdecode::Session(bundle, RoomFor(40, 8)));
  CHECK_THROWS_WITH(skipdecode::Session(bundle, RoomFor(40, 9)), Catch::Contains("9 new tokens: prompts leave 8"));
  skipdecode::Session session(bundle, RoomFor(5, 3));
  CHECK_THROWS_WITH(session.Add(Tokens(6, 5), Options(3)), Catch::Contains("6 tokens: the session takes 5"));
  CHECK_THROWS_WITH(session.Add(Tokens(5, 5), Options(4)), Catch::Contains("4 new tokens: the session takes 1..3"));
  CHECK_NOTHROW(session.Add(Tokens(5, 5), Options(3)));
}

TEST_CASE("with more prompts than a bundle takes rows, none of the prompts is read") {
  const size_t length = kPrompts[0].size();
  const skd_callback never = [](void*, const skd_event*) { return 1; };
  const auto said =
      CodeAndMessage(skd_generate(Bundle().get(), kPrompts[0].data(), &length, SIZE_MAX, nullptr, 0, never, nullptr));
  CHECK(said.first == SKD_ERROR_CAPACITY);
  CHECK_THAT(said.second, Catch::EndsWith("rows: the bundle takes 1..4; choose fewer, or export with a larger --max-batch"));
}

TEST_CASE("a bundle named by a relative path is found after the working directory changes") {
  const std::filesystem::path whole = std::getenv("SKD_TEST_BUNDLE"), before = std::filesystem::current_path();
  std::filesystem::current_path(whole.parent_path());
  const auto bundle = skipdecode::Bundle::Load(whole.filename());
  std::filesystem::current_path(before);
  CHECK_THROWS_WITH(skipdecode::Tokenizer(bundle), whole.string() + ": the bundle has no tokenizer; give token ids");
}

TEST_CASE("a row may fill the bundle's length to the last token") {
  CHECK(CallsOf({Tokens(40, 5)}, Options(8)) == 8);
  CHECK_THROWS_WITH(CallsOf({Tokens(40, 5)}, Options(9)), Catch::Contains("40 tokens and 9 new ones exceed the bundle's 48"));
}

TEST_CASE("a row that ends with its first token is reported as ended and is removed") {
  skipdecode::Session session(Bundle(), Room(2));
  const uint64_t ends = session.Add(kPrompts[0], Options(1)), goes_on = session.Add(kPrompts[1], Options(2));
  const std::vector<skd_event> first = session.Step();
  REQUIRE(first.size() == 2);
  for (const skd_event& event : first) {
    CHECK(event.prefill != 0);
    CHECK(event.layers == 6);  // prefill
    CHECK(event.finish == (event.row == ends ? SKD_FINISH_LENGTH : SKD_FINISH_NONE));
  }
  CHECK_THROWS_WITH(session.Cancel(ends), Catch::Contains("is not in this session"));
  const std::vector<skd_event> second = session.Step();
  REQUIRE(second.size() == 1);
  CHECK(second[0].row == goes_on);
  CHECK(second[0].prefill == 0);
  CHECK(session.Step().empty());
}

TEST_CASE("a last token that ends sequences is a stop, even if max_new_tokens is reached") {
  int stops = 0;
  for (uint64_t seed = 1; seed < 60; ++seed) {
    skd_row_options options = Options(20, seed);
    options.ignore_eos = 0;
    options.max_new_tokens = static_cast<uint32_t>(TokensAlone(Bundle(), kPrompts[0], options).size());
    if (options.max_new_tokens == 20) continue;
    CHECK(TokensAlone(Bundle(), kPrompts[0], Options(20, seed)).size() == 20);  // which ignore_eos goes on after
    skd_finish last = SKD_FINISH_NONE;
    skipdecode::Generate(Bundle(), {kPrompts[0]}, options, [&last](const skd_event& event) {
      last = event.finish;
      return true;
    });
    CHECK(last == SKD_FINISH_STOP);
    ++stops;
  }
  CHECK(stops > 2);
}

TEST_CASE("a callback that stops a row that has just ended changes nothing for the others") {
  int calls = 0;
  skipdecode::Generate(Bundle(), {kPrompts[0], kPrompts[1]}, Options(4), [&calls](const skd_event& event) {
    ++calls;
    return event.finish == SKD_FINISH_NONE;
  });
  CHECK(calls == 8);
}

TEST_CASE("a callback that has thrown is not called again, for any row") {
  int calls = 0;
  CHECK_THROWS_AS(skipdecode::Generate(Bundle(), {kPrompts[0], kPrompts[1], kPrompts[2]}, Options(4),
                                       [&calls](const skd_event&) -> bool {
                                         ++calls;
                                         throw std::logic_error("mine");
                                       }),
                  std::logic_error);
  CHECK(calls == 1);
}

TEST_CASE("all prompts are checked before one runs, and the wrong one is named") {
  int calls = 0;
  CHECK_THROWS_WITH(
      skipdecode::Generate(Bundle(), {{5}, {6}, {99}}, Options(3), [&calls](const skd_event&) { return ++calls > 0; }),
      Catch::StartsWith("prompt 2: token id 99 is outside the vocabulary"));
  CHECK(calls == 0);
}

TEST_CASE("row i of a call samples as generator_row + i") {
  skd_row_options options = Options(12, 9);
  options.generator_row = 5;
  std::vector<Tokens> found(3);
  skipdecode::Generate(Bundle(), {kPrompts[0], kPrompts[0], kPrompts[0]}, options, [&found](const skd_event& event) {
    found[event.row].push_back(event.token);
    return true;
  });
  for (uint32_t row = 0; row < 3; ++row) {
    options.generator_row = 5 + row;
    CHECK(found[row] == TokensAlone(Bundle(), kPrompts[0], options));
  }
  CHECK(found[0] != found[1]);
}

TEST_CASE("nanoseconds of prompts and steps are positive and no more than the time that passed") {
  skipdecode::Session session(Bundle(), Room(1));
  const auto began = std::chrono::steady_clock::now();
  session.Add(kPrompts[0], Options(20));
  while (!session.Step().empty()) {
  }
  const std::chrono::nanoseconds passed = std::chrono::steady_clock::now() - began;
  const skd_counters counters = session.counters();
  CHECK(counters.prefill_ns > 0);
  CHECK(counters.decode_ns > 0);
  CHECK(counters.prefill_ns + counters.decode_ns <= static_cast<uint64_t>(passed.count()));
}

TEST_CASE("a bundle's information fields are filled in") {
  const skd_bundle_info info = Bundle().info();
  CHECK(info.num_layers == 6);
  CHECK(info.num_variants == 5);
  CHECK(info.num_segments == 6);
  CHECK(info.max_length == 48);
  CHECK(info.max_batch == 4);
  CHECK(info.vocab_size == 99);
  CHECK(std::string(info.dtype) == "float32");
  CHECK(info.load_s > 0);
}

TEST_CASE("a schedule that a session cannot run is refused with a line") {
  // the bundle's own falls from 6 to 2 layers of 6, each count its own variant
  const auto refused = [](const std::vector<uint32_t>& layers, uint32_t full_depth = 0) {
    skd_session_options options = Room(1);
    options.layers = layers.data();
    options.num_positions = layers.size();
    options.full_depth = full_depth;
    skd_session* session = nullptr;
    const auto found = CodeAndMessage(skd_session_create(Bundle().get(), &options, &session));
    skd_session_destroy(session);
    return found;
  };
  const auto schedule = [](const std::string& line) { return std::pair(SKD_ERROR_SCHEDULE, line); };
  CHECK(refused({6, 6, 2}).first == SKD_OK);
  CHECK(refused({2, 3}) == schedule("the layer count rises at position 1; choose other layer counts"));
  CHECK(refused({7}) == schedule("7 layers at position 0: not among 2 .. 6; choose other layer counts"));
  CHECK(refused({1}) == schedule("1 layers at position 0: not among 2 .. 6; choose other layer counts"));
  CHECK(refused({6}, 1) == std::pair(SKD_ERROR_ARGUMENT, std::string("layers and full_depth are both given; see skipdecode.h")));
  std::vector<uint32_t> none;
  none.reserve(1);  // so that data() is not NULL
  CHECK(refused(none) == schedule("the table of layer counts is empty; choose other layer counts"));
}

TEST_CASE("a caller that knows fewer fields gets those, and no byte after them is written") {
  skd_bundle_info info{};
  info.struct_size = offsetof(skd_bundle_info, num_variants);
  info.num_variants = 12345;
  CHECK(CodeAndMessage(skd_bundle_get_info(Bundle().get(), &info)).first == SKD_OK);
  CHECK(info.num_layers == 6);
  CHECK(info.num_variants == 12345);
  CHECK(info.struct_size == offsetof(skd_bundle_info, num_variants));
}

TEST_CASE("options that are NULL are the defaults that the header documents") {
  skd_session* session = nullptr;
  uint64_t row = 7;
  REQUIRE(CodeAndMessage(skd_session_create(Bundle().get(), nullptr, &session)).first == SKD_OK);
  const std::string all = "64 new tokens: the session takes 1..24; choose another skd_row_options.max_new_tokens";
  CHECK_THAT(CodeAndMessage(skd_session_add(session, kPrompts[0].data(), kPrompts[0].size(), nullptr, &row)).second,
             Catch::Contains(all));
  CHECK(row == 7);  // untouched
  skd_session_destroy(session);
}

TEST_CASE("a session goes on as before after a caller's mistakes") {
  skd_session* session = nullptr;
  const skd_session_options room = Room(2);
  REQUIRE(CodeAndMessage(skd_session_create(Bundle().get(), &room, &session)).first == SKD_OK);
  const skd_row_options options = Options(6);
  skd_row_options wrong = options;
  wrong.struct_size = 0;
  uint64_t row = 0;
  REQUIRE(CodeAndMessage(skd_session_add(session, kPrompts[0].data(), kPrompts[0].size(), &options, &row)).first == SKD_OK);
  Tokens tokens;
  skd_event events[2];
  size_t count = 0;
  while (CodeAndMessage(skd_session_step(session, events, 2, &count)).first == SKD_OK && count > 0) {
    tokens.push_back(events[0].token);
    CHECK(CodeAndMessage(skd_session_step(session, events, 1, &count)).first == SKD_ERROR_ARGUMENT);
    CHECK(CodeAndMessage(skd_session_add(session, nullptr, 1, &options, &row)).first == SKD_ERROR_ARGUMENT);
    CHECK(CodeAndMessage(skd_session_add(session, kPrompts[1].data(), 2, &wrong, &row)).first == SKD_ERROR_ARGUMENT);
  }
  CHECK(tokens == TokensAlone(Bundle(), kPrompts[0], options));
  skd_session_destroy(session);
}

TEST_CASE("a step without room for all rows is refused before it runs") {
  skd_session* session = nullptr;
  const skd_session_options room = Room(2);
  REQUIRE(CodeAndMessage(skd_session_create(Bundle().get(), &room, &session)).first == SKD_OK);
  skd_event events[2];
  size_t count = 9;
  CHECK(CodeAndMessage(skd_session_step(session, events, 1, &count)) ==
        std::pair(SKD_ERROR_ARGUMENT, std::string("events has room for fewer than max_rows; see skipdecode.h")));
  CHECK(CodeAndMessage(skd_session_step(session, nullptr, 2, &count)).first == SKD_ERROR_ARGUMENT);
  CHECK(CodeAndMessage(skd_session_step(session, events, 2, nullptr)).first == SKD_ERROR_ARGUMENT);
  CHECK(count == 9);
  CHECK(CodeAndMessage(skd_session_step(session, events, 2, &count)).first == SKD_OK);
  CHECK(count == 0);
  skd_session_destroy(session);
}
