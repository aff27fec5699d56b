// The service's batcher when sessions fail: on a stand-in for the library, whose sessions fail when they are told to.
#include <atomic>
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "batcher.h"
#include "completion.h"
#include "running.h"

struct skd_status {};
struct skd_bundle {};
struct skd_session {
  std::vector<uint64_t> rows;
};

namespace {

std::atomic<bool> no_memory{false}, engines_fail{false}, row_lost{false};
std::atomic<int> sessions{0}, most_sessions{0};

}  // namespace

extern "C" {

skd_code skd_status_code(const skd_status* /*status*/) { return SKD_ERROR_INTERNAL; }
const char* skd_status_message(const skd_status* /*status*/) { return "told to fail"; }
void skd_status_destroy(skd_status* status) { delete status; }
skd_load_options skd_load_options_default() { return {}; }
skd_row_options skd_row_options_default() { return {}; }
skd_session_options skd_session_options_default() { return {sizeof(skd_session_options), 1, 0, 0, 0}; }

skd_status* skd_bundle_load(const char* /*path*/, const skd_load_options* /*options*/, skd_bundle** bundle) {
  *bundle = new skd_bundle;
  return nullptr;
}
void skd_bundle_destroy(skd_bundle* bundle) { delete bundle; }

skd_status* skd_session_create(const skd_bundle* /*bundle*/, const skd_session_options* /*options*/, skd_session** session) {
  if (no_memory) return new skd_status;
  *session = new skd_session;
  most_sessions = std::max(most_sessions.load(), ++sessions);
  return nullptr;
}
void skd_session_destroy(skd_session* session) {
  delete session;
  --sessions;
}
skd_status* skd_session_add(skd_session* session, const int64_t* /*prompt*/, size_t /*length*/,
                            const skd_row_options* /*options*/, uint64_t* row) {
  static std::atomic<uint64_t> next{0};
  *row = next++;
  session->rows.push_back(*row);
  return nullptr;
}
// Each row ends with its first token.
skd_status* skd_session_step(skd_session* session, skd_event* events, size_t /*capacity*/, size_t* count) {
  if (engines_fail) return new skd_status;
  *count = session->rows.size();
  for (size_t i = 0; i < *count; ++i) {
    events[i] = {session->rows[i] + (row_lost ? 1000U : 0U), 7, 1, 1, SKD_FINISH_STOP};
  }
  session->rows.clear();
  return nullptr;
}
skd_status* skd_session_cancel(skd_session* /*session*/, uint64_t /*row*/) { return nullptr; }
skd_status* skd_tokenizer_decode(skd_tokenizer* /*tokenizer*/, const int64_t* /*ids*/, size_t /*count*/, char** /*text*/,
                                 size_t* /*length*/) {
  return new skd_status;
}
skd_status* skd_tokenizer_encode(skd_tokenizer* /*tokenizer*/, const char* /*text*/, int64_t** /*ids*/, size_t* /*count*/) {
  return new skd_status;
}
void skd_tokenizer_destroy(skd_tokenizer* /*tokenizer*/) {}
void skd_free(void* /*memory*/) {}

}  // extern "C"

namespace {

class Requests {
 public:
  Requests() {
    no_memory = engines_fail = row_lost = false;
    most_sessions = sessions.load();
    batcher_ = std::make_unique<service::Batcher>(bundle_, skipdecode::SessionOptions(), 8, &metrics);
  }
  // The status that a client gets.
  int Ask() {
    service::Completion asked{};
    asked.prompts = {{1, 2, 3}};
    asked.gives_ids = true;
    service::Running running(asked, nullptr, service::Clock::now() + std::chrono::seconds(20), &active_);
    if (!batcher_->Submit(running.rows())) return 429;
    try {
      running.WaitForFirst();
    } catch (const service::HttpError& error) {
      return error.status();
    }
    return 200;
  }

  // Wait for its thread, which counts a row out after its client has the last token.
  void End() { batcher_.reset(); }

  service::Metrics metrics;

 private:
  const skipdecode::Bundle bundle_ = skipdecode::Bundle::Load("");
  std::atomic<int> active_{0};
  std::unique_ptr<service::Batcher> batcher_;
};

}  // namespace

TEST_CASE("engines that fail end the rows that they had, and a new session serves the next, never two at a time") {
  Requests requests;
  CHECK(requests.Ask() == 200);
  engines_fail = true;
  CHECK(requests.Ask() == 500);
  CHECK(requests.Ask() == 500);
  engines_fail = false;
  CHECK(requests.Ask() == 200);
  requests.End();
  CHECK(most_sessions == 1);
  CHECK(requests.metrics.failed == 2);
  CHECK(requests.metrics.running == 0);
}

TEST_CASE("while there is no memory for a session requests are refused, and served when there is again") {
  Requests requests;
  engines_fail = true;
  no_memory = true;
  CHECK(requests.Ask() == 500);
  CHECK(requests.Ask() == 503);
  CHECK(requests.Ask() == 503);
  engines_fail = false;
  no_memory = false;
  CHECK(requests.Ask() == 200);
}

TEST_CASE("a row that the batcher does not know ends the session and no more") {
  Requests requests;
  row_lost = true;
  CHECK(requests.Ask() == 500);
  row_lost = false;
  CHECK(requests.Ask() == 200);
}
