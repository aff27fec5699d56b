// Each call of the GPU's driver fails in turn: which error that is, whether callers who may go on can, and that nothing is left.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "bundle.h"
#include "catch.h"
#include "cuda_stream.h"
#include "device_bundles.h"
#include "error.h"
#include "gpu_engines.h"
#include "replay.h"
#include "session.h"
#include "standin_driver.h"
#include "turn_around.h"

namespace {

constexpr int kOutOfMemory = 2, kUnknown = 999;  // CUresult

// Calls of the driver that fail: after how many that work, how many, and how.
struct Failures {
  int first, count, result;
};

void Begin(const Failures& failures) {
  *Driver<int>("standin_calls_left") = failures.first;
  *Driver<int>("standin_failures_left") = failures.count;
  *Driver<int>("standin_failure") = failures.result;
}

// From now on all calls work. Returns whether any has failed.
bool End(const Failures& failures) {
  *Driver<int>("standin_calls_left") = -1;
  return *Driver<int>("standin_failures_left") < failures.count;
}

// The code of the error that `call` throws, SKD_OK if none.
skd_code CodeOf(const std::function<void()>& call) {
  try {
    call();
    return SKD_OK;
  } catch (const skd::Error& error) {
    return error.code();
  }
}

// A session from its creation to its end, with failures: rows join, move, leave and end, with enough steps for graphs. A call
// that fails and changes nothing is made again. Any other failure ends the session.
class Life {
 public:
  Life(const std::shared_ptr<const skd::Bundle>& bundle, const Failures& failures) : failures_(failures) {
    Begin(failures);
    completed =
        Create(bundle) && Add(3, 8) && AddInParts(1, 9) && Step(4) && Add(0, 4) && Step(3) && Logits() && Cancel(1) && Step(2);
    failed = End(failures) || failed;
    session_.reset();
  }

  std::map<uint32_t, Tokens> tokens;  // by the prompt's number
  std::string failed_call;            // empty: none, although the driver may have failed
  bool failed = false;                // whether the driver has
  bool completed;

 private:
  bool Create(const std::shared_ptr<const skd::Bundle>& bundle) {
    skd_session_options room = skd_session_options_default();
    room.max_rows = 3;
    room.max_prompt_tokens = 8;
    return Try("create", [&] { session_.emplace(bundle, room); });
  }
  static skd_row_options Options(uint32_t number, uint32_t max_new_tokens) {
    skd_row_options options = skd_row_options_default();
    options.max_new_tokens = max_new_tokens;
    options.do_sample = number % 2;
    options.ignore_eos = 1;
    return options;
  }
  bool Add(uint32_t number, uint32_t max_new_tokens) {
    const Tokens& prompt = kPrompts[number];
    return Try("add", [&] { numbers_[session_->Add(prompt.data(), prompt.size(), Options(number, max_new_tokens))] = number; });
  }
  // With a step after the first part. A prompt of which a part fails begins anew.
  bool AddInParts(uint32_t number, uint32_t max_new_tokens) {
    const Tokens& prompt = kPrompts[number];
    bool under_way = false, joined = false;
    const auto part = [&] {
      if (!under_way) numbers_[session_->Begin(prompt.data(), prompt.size(), Options(number, max_new_tokens))] = number;
      under_way = false;
      joined = session_->RunPart(1);
      under_way = !joined;
    };
    if (!Try("part", part) || !Step(1)) return false;
    while (!joined && Try("part", part)) {
    }
    return joined;
  }
  bool Step(int count) {
    const auto step = [this] {
      for (const skd_event& event : session_->Step()) tokens[numbers_.at(event.row)].push_back(event.token);
    };
    return count == 0 || (Try("step", step) && Step(count - 1));
  }
  bool Logits() {
    return Try("logits", [this] { session_->Logits(0); });
  }
  bool Cancel(uint32_t number) {
    const auto last = std::find_if(numbers_.rbegin(), numbers_.rend(), [=](const auto& each) { return each.second == number; });
    return Try("cancel", [&] { session_->Cancel(last->first); });
  }

  // Returns whether the session can go on.
  bool Try(const char* name, const std::function<void()>& call) {
    const skd_code code = CodeOf(call);
    if (code == SKD_OK) return true;
    failed = End(failures_);
    INFO(name << " failed with " << code);
    REQUIRE((failed && failed_call.empty()));
    failed_call = name;
    const bool may_be_capacity = failures_.result == kOutOfMemory && failed_call != "cancel";  // there it has another meaning
    CHECK((code == SKD_ERROR_TARGET || (code == SKD_ERROR_CAPACITY && may_be_capacity)));
    if (failures_.result == kOutOfMemory && failed_call == "create") CHECK(code == SKD_ERROR_CAPACITY);
    if (code == SKD_ERROR_CAPACITY) call();
    return code == SKD_ERROR_CAPACITY;
  }

  Failures failures_;
  std::optional<skd::Session> session_;
  std::map<uint64_t, uint32_t> numbers_;  // row -> its prompt
};

// Checks lives in which the driver's first call fails, then its second, and so on. Returns how often each call failed.
std::map<std::string, int> CheckLives(const std::shared_ptr<const skd::Bundle>& bundle, int count, int result) {
  const Life whole(bundle, {-1, 0, result});
  REQUIRE((whole.completed && !whole.failed));
  const std::string before = Alive();
  std::map<std::string, int> failed_calls;
  for (int first = 0;; ++first) {
    INFO(bundle->path << ": after " << first << " calls, " << count << " fail with " << result);
    const Life life(bundle, {first, count, result});
    if (!life.failed) return failed_calls;
    ++failed_calls[life.failed_call];
    if (life.completed) CHECK(life.tokens == whole.tokens);
    REQUIRE(Alive() == before);
  }
}

}  // namespace

TEST_CASE("whichever call of the driver fails while a session lives, the error is a documented one and nothing is left",
          "[each_failure]") {
  skd::UseOnnxRuntime("", 2);
  const GpuEngines engines;
  for (const std::string& path : {DeviceBundles().front(), DeviceBundles().back()}) {
    // creating, adding, parts, steps, logits, cancelling, and nothing: what cannot become a graph stays a call
    CHECK(CheckLives(skd::LoadBundle(path, "cuda", 2, ""), 1, kOutOfMemory).size() == 7);
  }
}

TEST_CASE("the same if from then on all calls fail that take memory or put work on the stream", "[each_failure]") {
  skd::UseOnnxRuntime("", 2);
  const GpuEngines engines;
  const auto bundle = skd::LoadBundle(DeviceBundles().back(), "cuda", 2, "");
  CHECK(CheckLives(bundle, INT_MAX, kOutOfMemory).size() == 6);  // without a graph, the step fails all the same
  CHECK(CheckLives(bundle, INT_MAX, kUnknown).size() == 6);
}

TEST_CASE("whichever call of the driver fails while a bundle loads, nothing is left") {
  skd::UseOnnxRuntime("", 2);
  const GpuEngines engines;
  std::shared_ptr<const skd::Bundle> bundle;
  const auto load = [&bundle] { bundle = skd::LoadBundle(DeviceBundles().front(), "cuda", 2, ""); };
  load();
  REQUIRE(bundle->tied_weight != nullptr);
  bundle.reset();
  const std::string before = Alive();
  for (const int result : {kOutOfMemory, kUnknown}) {
    int first = 0;
    for (bool failed = true; failed; ++first) {
      const Failures failures{first, INT_MAX, result};
      Begin(failures);
      const skd_code code = CodeOf(load);
      failed = End(failures);
      bundle.reset();
      INFO(first << " calls worked before they failed with " << result);
      CHECK(code == (!failed ? SKD_OK : result == kOutOfMemory ? SKD_ERROR_CAPACITY : SKD_ERROR_TARGET));
      CHECK(Alive() == before);
    }
    CHECK(first > 4);  // memory for the weight is allocated and cleared, the weight is sent and waited for
  }
}

// In a process of its own, in which nothing has used the driver yet.
TEST_CASE("what a process creates once is created once, however often that fails", "[.first_use]") {
  const auto attempt = [](int works, const std::string& left) {
    const Failures failures{works, 1, kOutOfMemory};
    Begin(failures);
    INFO(works << " calls worked");
    CHECK(CodeOf(skd::TurnAroundKernel) == SKD_ERROR_CAPACITY);
    CHECK(End(failures));
    CHECK(Alive() == "memory 0, pinned 0, contexts 0, " + left + ", graphs 0, launchables 0");
  };
  attempt(0, "streams 0, events 0, modules 0");
  attempt(1, "streams 1, events 0, modules 0");
  attempt(0, "streams 1, events 0, modules 0");
  attempt(1, "streams 1, events 1, modules 0");
  attempt(1, "streams 1, events 1, modules 1");
  attempt(0, "streams 1, events 1, modules 1");
  CHECK(skd::TurnAroundKernel() != nullptr);
  CHECK_THAT(Alive(), Catch::Contains("streams 1, events 1, modules 1"));

  const auto enqueue = [] {
    const auto nothing = [](void*) {};
    Driver<int(void*, void (*)(void*), void*)>("standin_launch")(skd::cuda_stream::Handle(), nothing, nullptr);
  };
  skd::Replay replay(true);
  replay.Run(enqueue);
  const Failures failures{1, 1, kOutOfMemory};  // there is memory for another context, but not for its kernel
  Begin(failures);
  CHECK(replay.Run(enqueue));
  CHECK(End(failures));
  CHECK_THAT(Alive(), Catch::Contains("contexts 0"));
}
