// Sessions as on a GPU, which chooses their tokens, compared with sessions whose engines and choices are on the host.
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bundle.h"
#include "catch.h"
#include "device_bundles.h"
#include "error.h"
#include "gpu_engines.h"
#include "session.h"
#include "standin_driver.h"

namespace {

skd_session_options Room() {
  skd_session_options options = skd_session_options_default();
  options.max_rows = 3;
  options.max_prompt_tokens = 8;
  return options;
}

// The options of row `number`, which differ from row to row: greedy, with top-p, with top-k, or sampled from all tokens.
skd_row_options OptionsFor(uint32_t number, uint32_t max_new_tokens) {
  skd_row_options options = skd_row_options_default();
  options.max_new_tokens = max_new_tokens;
  options.do_sample = number % 4 == 0 ? 0 : 1;
  options.temperature = 0.5 + number;
  options.top_p = number % 4 == 1 ? 0.9 : 1;
  options.top_k = number % 4 == 2 ? 20 : number % 4 == 3 ? UINT32_MAX : 0;
  options.seed = 1000 + number;
  options.generator_row = 7 * number;
  options.ignore_eos = 1;
  return options;
}

// What rows that join and leave get: their tokens, and the logits from which each was chosen.
class Run {
 public:
  explicit Run(const std::shared_ptr<const skd::Bundle>& bundle)
      : session_(bundle, Room()), vocab_size_(bundle->manifest.model.vocab_size) {
    Add(0, 20);
    Step(3);
    const uint64_t leaves = Add(1, 15);
    Add(2, 4);
    Step(3);
    const std::map<uint64_t, std::vector<float>> before = latest_;
    session_.Cancel(leaves);
    latest_.erase(leaves);
    Collect();
    for (const auto& [row, found] : latest_) {
      if (found != before.at(row))
        throw std::logic_error("a row's logits have changed");  // Catch's assertions are not thread-safe
    }
    AddInParts(3, 9);
    Step(30);
  }

  std::map<uint64_t, Tokens> tokens;
  std::vector<std::vector<float>> logits;

  uint64_t graph_launches() const { return session_.Counters().graph_launches; }

 private:
  uint64_t Add(uint32_t number, uint32_t max_new_tokens) {
    const Tokens& prompt = kPrompts[number];
    const uint64_t row = session_.Add(prompt.data(), prompt.size(), OptionsFor(number, max_new_tokens));
    latest_[row] = {};
    Collect();
    return row;
  }
  // With steps of the other rows between the parts.
  void AddInParts(uint32_t number, uint32_t max_new_tokens) {
    const Tokens& prompt = kPrompts[number];
    const uint64_t row = session_.Begin(prompt.data(), prompt.size(), OptionsFor(number, max_new_tokens));
    while (!session_.RunPart(1)) Step(1);
    latest_[row] = {};
    Collect();
  }
  void Step(int count) {
    while (count-- > 0) {
      for (const skd_event& event : session_.Step()) {
        tokens[event.row].push_back(event.token);
        if (event.finish != SKD_FINISH_NONE) latest_.erase(event.row);
      }
      Collect();
    }
  }
  void Collect() {
    for (auto& [row, found] : latest_) {
      const float* now = session_.Logits(row);
      found.assign(now, now + vocab_size_);
      logits.push_back(found);
    }
  }

  skd::Session session_;
  int64_t vocab_size_;
  std::map<uint64_t, std::vector<float>> latest_;  // logits of the rows that have not ended
};

}  // namespace

TEST_CASE("a GPU chooses the host's tokens, for rows that come and go and have their own sampling") {
  for (const std::string& path : DeviceBundles()) {
    const Run wanted(skd::LoadBundle(path, "cuda", 2, "", false, skd::Device::kCpu));
    REQUIRE(wanted.tokens.size() == 4);
    const GpuEngines engines;
    for (const bool graphs : {false, true}) {
      INFO(path << (graphs ? " by graphs" : " by calls"));
      const Run found(skd::LoadBundle(path, "cuda", 2, "", graphs));
      CHECK(found.tokens == wanted.tokens);
      CHECK((found.logits == wanted.logits));
      CHECK((found.graph_launches() > 0) == graphs);
    }
  }
}

TEST_CASE("a step of rows that stay as they are sends nothing to the GPU") {
  skd::UseOnnxRuntime("", 2);
  const GpuEngines engines;
  skd::Session session(skd::LoadBundle(DeviceBundles().front(), "cuda", 2, ""), Room());
  for (const uint32_t number : {0U, 1U}) session.Add(kPrompts[number].data(), kPrompts[number].size(), OptionsFor(number, 6));
  session.Step();
  session.Step();
  const int sent = Driver<int()>("standin_sent")();
  session.Step();
  session.Step();
  CHECK(Driver<int()>("standin_sent")() == sent);
}

TEST_CASE("a row whose first token the GPU has no memory to choose takes no place") {
  skd::UseOnnxRuntime("", 2);
  const GpuEngines engines;
  skd::Session session(skd::LoadBundle(DeviceBundles().front(), "cuda", 2, ""), Room());
  int* const without_kernels = Driver<int>("standin_without_kernels");
  const auto add = [&session] { return session.Add(kPrompts[0].data(), kPrompts[0].size(), OptionsFor(0, 3)); };
  *without_kernels = 1;
  try {
    add();
    FAIL("it was added");
  } catch (const skd::Error& error) {
    CHECK(error.code() == SKD_ERROR_CAPACITY);
  }
  CHECK(session.Step().empty());
  *without_kernels = 0;
  CHECK(add() == 0);
  CHECK(session.Step().size() == 1);
}

TEST_CASE("rows that had made room for one whose first token the GPU could not choose go on as before") {
  const std::string absolute = DeviceBundles().back();  // rows with longer prompts are placed before others, and move them
  skd::UseOnnxRuntime("", 2);
  const GpuEngines engines;
  const auto bundle = skd::LoadBundle(absolute, "cuda", 2, "");
  std::map<bool, std::map<uint64_t, Tokens>> tokens;
  std::map<bool, std::vector<float>> logits;
  for (const bool fails : {false, true}) {
    skd::Session session(bundle, Room());
    for (const uint32_t number : {3U, 1U}) session.Add(kPrompts[number].data(), kPrompts[number].size(), OptionsFor(number, 8));
    session.Step();
    session.Step();
    *Driver<int>("standin_without_kernels") = fails ? 1 : 0;
    if (fails) CHECK_THROWS_AS(session.Add(kPrompts[0].data(), kPrompts[0].size(), OptionsFor(0, 8)), skd::Error);
    *Driver<int>("standin_without_kernels") = 0;
    const float* found = session.Logits(1);
    logits[fails].assign(found, found + bundle->manifest.model.vocab_size);
    for (int step = 0; step < 8; ++step) {
      for (const skd_event& event : session.Step()) tokens[fails][event.row].push_back(event.token);
    }
  }
  CHECK(tokens[true] == tokens[false]);
  CHECK((logits[true] == logits[false]));
}

TEST_CASE("time spent waiting for a GPU's tokens counts as its engines'") {
  skd::UseOnnxRuntime("", 2);
  const GpuEngines engines;
  skd::Session session(skd::LoadBundle(DeviceBundles().front(), "cuda", 2, ""), Room());
  session.Add(kPrompts[0].data(), kPrompts[0].size(), OptionsFor(0, 9));
  *Driver<int>("standin_wait_ms") = 5;
  while (!session.Step().empty()) {
  }
  *Driver<int>("standin_wait_ms") = 0;
  const skd_counters counters = session.Counters();
  CHECK(counters.decode_engine_ns >= counters.decode_steps * 5'000'000);
  CHECK(counters.decode_engine_ns <= counters.decode_ns);
}

TEST_CASE("sessions on separate threads share a GPU's stream and get the same tokens as alone") {
  skd::UseOnnxRuntime("", 2);
  const GpuEngines engines;
  const auto bundle = skd::LoadBundle(DeviceBundles().front(), "cuda", 2, "");
  const Run wanted(bundle);
  std::vector<std::future<std::map<uint64_t, Tokens>>> others;
  others.reserve(3);
  for (int i = 0; i < 3; ++i) others.push_back(std::async(std::launch::async, [&bundle] { return Run(bundle).tokens; }));
  for (auto& other : others) CHECK(other.get() == wanted.tokens);
}

TEST_CASE("a step whose tokens the GPU has no memory to choose does not claim that nothing has changed") {
  skd::UseOnnxRuntime("", 2);
  const GpuEngines engines;
  skd::Session session(skd::LoadBundle(DeviceBundles().front(), "cuda", 2, ""), Room());
  session.Add(kPrompts[0].data(), kPrompts[0].size(), OptionsFor(0, 3));
  session.Step();
  int* const without_kernels = Driver<int>("standin_without_kernels");
  *without_kernels = 1;
  try {
    session.Step();
    FAIL("it was made");
  } catch (const skd::Error& error) {
    CHECK(error.code() == SKD_ERROR_TARGET);
    CHECK(std::string(error.what()).find("failed halfway") != std::string::npos);
  }
  *without_kernels = 0;
}

TEST_CASE("rows that the GPU has no memory to move are not reported as unchanged") {
  skd::UseOnnxRuntime("", 2);
  const GpuEngines engines;
  const auto bundle = skd::LoadBundle(DeviceBundles().front(), "cuda", 2, "");
  int* const copies_left = Driver<int>("standin_copies_left");
  for (const bool cancelled : {false, true}) {
    INFO("the first row is " << (cancelled ? "cancelled" : "at its end"));
    skd::Session session(bundle, Room());
    const uint64_t first = session.Add(kPrompts[0].data(), kPrompts[0].size(), OptionsFor(0, 2));
    session.Add(kPrompts[1].data(), kPrompts[1].size(), OptionsFor(1, 9));  // which then moves to the first one's place
    session.Step();
    *copies_left = 1;  // of several for a row
    try {
      if (cancelled) {
        session.Cancel(first);
      } else {
        session.Step();
      }
      FAIL("it was moved");
    } catch (const skd::Error& error) {
      CHECK(error.code() == SKD_ERROR_TARGET);
      CHECK(std::string(error.what()) ==
            "moving rows failed halfway (CUDA has no memory left; ask for fewer rows, shorter prompts or fewer new tokens); "
            "destroy the session and create another");
    }
    *copies_left = -1;
  }
}
