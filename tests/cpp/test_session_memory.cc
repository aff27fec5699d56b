// Sessions and loads when memory runs out, and the memory of others.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <skipdecode/skipdecode.hpp>
#include <thread>
#include <utility>
#include <vector>

#include "allocations.h"
#include "catch.h"
#include "session_helpers.h"

namespace {

// Repeat a call until it succeeds, each time with one more allocation that succeeds. Returns how often it failed.
template <typename Call>
int CountFailures(Call call) {
  for (int failures = 0;; ++failures) {
    FailAllocationAfter(failures);
    try {
      call();
      StopFailingAllocations();
      return failures;
    } catch (const skipdecode::Error&) {
    } catch (const std::bad_alloc&) {  // from the C++ header's own code
    }
    StopFailingAllocations();
  }
}

}  // namespace

TEST_CASE("a call that runs out of memory anywhere leaves the session as it was") {
  // in the second bundle, rows that join move others, together with their linear-attention states
  for (const auto& [variable, seed] : {std::pair("SKD_TEST_BUNDLE", 7U), std::pair("SKD_TEST_ABSOLUTE_HYBRID_BUNDLE", 0U)}) {
    const skipdecode::Bundle& bundle = Bundle(variable);
    skipdecode::Session session(bundle, Room(3));
    std::map<uint64_t, Tokens> found, wanted;
    int failures = 0;
    for (size_t prompt = 0; prompt < 3; ++prompt) {
      uint64_t row = 0;
      const skd_row_options options = Options(6 + static_cast<uint32_t>(prompt), seed);
      failures += CountFailures([&] { row = session.Add(kPrompts[prompt], options); });
      REQUIRE(row == prompt);  // no failure used up a place or a number
      wanted[row] = TokensAlone(bundle, kPrompts[prompt], options);
    }
    bool ended = false;
    while (!ended) {
      std::vector<skd_event> events;
      events.reserve(3);
      failures += CountFailures([&] {
        const auto& told = session.Step();
        events.assign(told.begin(), told.end());
      });
      ended = events.empty();
      AppendTokens(events, &found);
    }
    REQUIRE(found == wanted);
    REQUIRE(failures > 10);
    REQUIRE(session.counters().tokens == 6 + 7 + 8);
  }
}

TEST_CASE("a step that runs out of memory after a row has joined leaves nothing to the steps after that row has left") {
  skd_session_options room = Room(2);
  room.full_depth = 1;  // all steps of one row compute as many layers
  Tokens wanted;
  const auto take = [&wanted](const skd_event& event) { return wanted.push_back(event.token), true; };
  skipdecode::Generate(Bundle(), {kPrompts[0]}, Options(6), take, true);
  int failures = 0;
  for (bool failed = true; failed; failures += failed ? 1 : 0) {
    skipdecode::Session session(Bundle(), room);
    std::map<uint64_t, Tokens> found;
    const uint64_t row = session.Add(kPrompts[0], Options(6));
    for (int step = 0; step < 2; ++step) AppendTokens(session.Step(), &found);
    const uint64_t other = session.Add(kPrompts[1], Options(6));
    session.Step();  // tells the first token of the row that has joined
    std::vector<skd_event> events;
    events.reserve(2);
    FailAllocationAfter(failures);
    try {
      const auto& told = session.Step();
      events.assign(told.begin(), told.end());
      failed = false;
    } catch (const skipdecode::Error&) {
    } catch (const std::bad_alloc&) {  // from the C++ header's own code
    }
    StopFailingAllocations();
    AppendTokens(events, &found);
    session.Cancel(other);
    while (AppendTokens(session.Step(), &found) > 0) {
    }
    REQUIRE(found[row] == wanted);
  }
  CHECK(failures > 10);
}

TEST_CASE("a prompt whose parts run out of memory anywhere can begin anew, and leaves the other rows as they were") {
  for (const auto& [variable, seed] : {std::pair("SKD_TEST_BUNDLE", 7U), std::pair("SKD_TEST_ABSOLUTE_HYBRID_BUNDLE", 0U)}) {
    const skipdecode::Bundle& bundle = Bundle(variable);
    skipdecode::Session session(bundle, Room(4));
    std::map<uint64_t, Tokens> found, wanted;
    int failures = 0;
    for (size_t prompt = 0; prompt < 3; ++prompt) {
      const skd_row_options options = Options(9, seed);
      uint64_t row = 0;
      failures += CountFailures([&] {
        row = session.Begin(kPrompts[prompt], options);
        while (!session.Prefill(1)) {
        }
      });
      wanted[row] = TokensAlone(bundle, kPrompts[prompt], options);
      AppendTokens(session.Step(), &found);
    }
    while (AppendTokens(session.Step(), &found) > 0) {
    }
    REQUIRE(found == wanted);
    REQUIRE(failures > 10);
  }
}

TEST_CASE("a load that runs out of memory after its manifest is refused, and another can follow") {
  const char* const path = std::getenv("SKD_TEST_BUNDLE");
  REQUIRE(path != nullptr);
  // on one core, where no other thread takes part of the work, all loads allocate alike
  cpu_set_t before, one;
  REQUIRE(sched_getaffinity(0, sizeof before, &before) == 0);
  CPU_ZERO(&one);
  for (int core = 0; CPU_COUNT(&one) == 0; ++core) {
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  }
  REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
  Bundle();  // what only a process's first load does is done
  // whether it fails, and how many of the `after` allocations it does not reach
  const auto load = [path](int after, const char* target) {
    skd_load_options options = skipdecode::LoadOptions();
    options.target = target;
    skd_bundle* bundle = nullptr;
    FailAllocationAfter(after);
    skd_status* const status = skd_bundle_load(path, &options, &bundle);
    const std::pair<bool, int> found(status != nullptr, AllocationsLeft());
    StopFailingAllocations();
    skd_status_destroy(status);
    skd_bundle_destroy(bundle);
    return found;
  };
  constexpr int kMany = 1 << 30;
  // begins after the manifest: nlohmann-json also allocates to destroy a value, and ends the process if that fails
  const int manifest = kMany - load(kMany, "nowhere").second, count = kMany - load(kMany, "cpu").second;
  REQUIRE(count > manifest + 100);
  int failed = 0;
  for (int after = manifest; after < count; after += (count - manifest) / 30) failed += load(after, "cpu").first ? 1 : 0;
  // up to the last, for the handles of what is loaded; their number varies a little with what a sanitizer has mapped
  int last = count - 40;
  while (load(last, "cpu").first) ++last;
  sched_setaffinity(0, sizeof before, &before);
  CHECK(failed > 20);
  CHECK(last > count - 20);
  CHECK(TokensAlone(skipdecode::Bundle::Load(path), {5, 6}, Options(3)) == TokensAlone(Bundle(), {5, 6}, Options(3)));
}

TEST_CASE("loading and releasing bundles on two threads takes no memory from others") {
  const auto come_and_go = [] {
    for (int i = 0; i < 40; ++i) skipdecode::Bundle::Load(std::getenv("SKD_TEST_BUNDLE"));
  };
  std::atomic<bool> loading{true};
  std::atomic<int> lost{0};
  const auto hold_memory = [&] {
    while (loading) {
      std::vector<std::pair<char*, size_t>> blocks;  // small mappings, which take the addresses of others
      for (size_t pages = 1; pages <= 40; ++pages) {
        void* block = mmap(nullptr, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (block == MAP_FAILED) std::abort();  // Catch's assertions are not thread-safe
        std::memset(block, 'Z', pages * 4096);
        blocks.emplace_back(static_cast<char*>(block), pages * 4096);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(600));
      for (const auto& [block, size] : blocks) {
        lost += static_cast<int>(std::count(block, block + size, '\0'));
        munmap(block, size);
      }
    }
  };
  std::thread first(hold_memory), second(hold_memory), other(come_and_go);
  come_and_go();
  other.join();
  loading = false;
  first.join();
  second.join();
  CHECK(lost == 0);
}
