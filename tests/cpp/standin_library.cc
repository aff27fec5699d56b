#include "standin_library.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <thread>
#include <utility>

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

StandinLibrary library;

void StandinLibrary::Reset() {
  slow_session = no_memory = gpu_lost = engines_fail = row_lost = endless = false;
  begin_fails = part_fails = SKD_OK;
  prompt_parts = 1;
  part_ms = 0;
  token = 7;
  num_decoded_ids = 0;
  generator_rows.clear();
  calls.clear();
  most_sessions = sessions.load();
}

std::string StandinLibrary::Order() const {
  std::string order;
  for (const char call : calls) {
    if (call != 'd' || order.back() != 'd') order += call;
  }
  return order;
}

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
  if (library.slow_session) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  if (library.no_memory) return new skd_status{SKD_ERROR_CAPACITY};
  if (library.gpu_lost) return new skd_status{SKD_ERROR_TARGET};
  *session = new skd_session;
  ++library.sessions_made;
  library.most_sessions = std::max(library.most_sessions.load(), ++library.sessions);
  return nullptr;
}
void skd_session_destroy(skd_session* session) {
  delete session;
  --library.sessions;
}
skd_status* skd_session_begin(skd_session* session, const int64_t* /*prompt*/, size_t /*length*/, const skd_row_options* options,
                              uint64_t* row) {
  if (library.begin_fails != SKD_OK) return new skd_status{static_cast<skd_code>(library.begin_fails.load())};
  static std::atomic<uint64_t> next{0};
  *row = next++;
  session->beginning = *row;
  session->parts = library.prompt_parts;
  library.generator_rows.push_back(options->generator_row);
  return nullptr;
}
skd_status* skd_session_prefill(skd_session* session, uint32_t /*tokens*/, int* joined) {
  if (library.part_fails != SKD_OK) {
    session->beginning.reset();
    return new skd_status{static_cast<skd_code>(library.part_fails.load())};
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(library.part_ms));
  *joined = --session->parts == 0 ? 1 : 0;
  library.calls += *joined != 0 ? 'a' : 'p';
  if (*joined == 0) return nullptr;
  session->rows.push_back(*std::exchange(session->beginning, std::nullopt));
  ++session->joined;
  return nullptr;
}
// First tokens come alone. Each row ends with its own or, if `library.endless`, never.
skd_status* skd_session_step(skd_session* session, skd_event* events, size_t /*capacity*/, size_t* count) {
  if (library.engines_fail) return new skd_status{SKD_ERROR_INTERNAL};
  const size_t joined = std::exchange(session->joined, 0);
  const size_t first = joined > 0 ? session->rows.size() - joined : 0;
  *count = session->rows.size() - first;
  for (size_t i = 0; i < *count; ++i) {
    events[i] = {session->rows[first + i] + (library.row_lost ? 1000U : 0U), library.token, 1, joined > 0 ? 1U : 0U,
                 library.endless ? SKD_FINISH_NONE : SKD_FINISH_STOP};
  }
  if (*count > 0) library.calls += joined > 0 ? 'f' : 'd';
  if (library.endless) {
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
  library.num_decoded_ids += count;
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
