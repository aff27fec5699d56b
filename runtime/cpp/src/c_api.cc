// The C interface: opaque handles, statuses instead of exceptions.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bundle.h"
#include "error.h"
#include "session.h"
#include "skipdecode/skipdecode.h"
#include "tokenizer.h"

struct skd_status {
  skd_code code;
  std::string message;
};

struct skd_bundle {
  std::shared_ptr<const skd::Bundle> bundle;
};

struct skd_session {
  skd::Session session;
};

struct skd_tokenizer {
  skd::Tokenizer tokenizer;
};

namespace {

constexpr char kNoMemory[] = "out of memory; ask for fewer rows or tokens, or free some";

// Returned when not even a status can be allocated; never freed.
skd_status no_memory{SKD_ERROR_CAPACITY, "out of memory"};

skd_status* NewStatus(skd_code code, const char* message) {
  try {
    return new skd_status{code, skd::OneLine(message)};
  } catch (...) {
    return &no_memory;
  }
}

// Runs `body`; what it throws becomes a status.
template <typename Body>
skd_status* Guarded(Body body) {
  try {
    body();
    return nullptr;
  } catch (const skd::Error& error) {
    return NewStatus(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return NewStatus(SKD_ERROR_CAPACITY, kNoMemory);
  } catch (const std::length_error&) {  // from a vector larger than any memory
    return NewStatus(SKD_ERROR_CAPACITY, kNoMemory);
  } catch (const std::exception& error) {
    return NewStatus(SKD_ERROR_INTERNAL, error.what());
  } catch (...) {
    return NewStatus(SKD_ERROR_INTERNAL, "an unknown exception");
  }
}

void Require(bool holds, const char* what) {
  if (!holds) throw skd::Error(SKD_ERROR_ARGUMENT, what, "see skipdecode.h");
}

// The caller's options. The struct is shorter if the caller was compiled with an older header; defaults complete it.
template <typename Options>
Options WithDefaults(const Options* given, Options defaults) {
  if (given == nullptr) return defaults;
  Require(given->struct_size >= sizeof given->struct_size && given->struct_size <= sizeof defaults, "struct_size is wrong");
  std::memcpy(&defaults, given, given->struct_size);
  return defaults;
}

// Copies as much of `filled` as the caller's struct has room for.
template <typename Info>
void CopyOut(Info filled, Info* wanted) {
  Require(wanted->struct_size >= sizeof wanted->struct_size && wanted->struct_size <= sizeof filled, "struct_size is wrong");
  filled.struct_size = wanted->struct_size;
  std::memcpy(wanted, &filled, wanted->struct_size);
}

std::string TextOrEmpty(const char* text) { return text == nullptr ? "" : text; }

void* MallocCopy(const void* data, size_t size) {
  void* memory = std::malloc(std::max<size_t>(size, 1));  // NOLINT(cppcoreguidelines-no-malloc)
  if (memory == nullptr) throw std::bad_alloc();
  if (size > 0) std::memcpy(memory, data, size);
  return memory;
}

// The prompts of a skd_generate call, in the caller's order; `starts` index `ids`.
struct Prompts {
  const int64_t* ids;
  std::vector<size_t> starts, lengths;
};

Prompts Split(const int64_t* ids, const size_t* lengths, size_t rows) {
  Prompts prompts{ids, {}, {lengths, lengths + rows}};
  size_t start = 0;
  for (const size_t length : prompts.lengths) {
    prompts.starts.push_back(start);
    start += length;
  }
  return prompts;
}

skd_session_options RoomFor(const Prompts& prompts, const skd_row_options& options, int full_depth,
                            const skd::Manifest& manifest) {
  skd_session_options room = skd_session_options_default();
  const size_t longest = *std::max_element(prompts.lengths.begin(), prompts.lengths.end());
  const auto most = static_cast<size_t>(manifest.limits.max_length);
  if (options.max_new_tokens < 1) {
    throw skd::CapacityError("0 new tokens: the bundle takes 1 or more", "choose another skd_row_options.max_new_tokens");
  }
  if (options.max_new_tokens > most || longest > most - options.max_new_tokens) {
    throw skd::CapacityError(std::to_string(longest) + " tokens and " + std::to_string(options.max_new_tokens) +
                                 " new ones exceed the bundle's " + std::to_string(most),
                             "shorten the prompt, lower skd_row_options.max_new_tokens, or export with a larger --max-length");
  }
  room.max_rows = static_cast<uint32_t>(std::min<size_t>(prompts.lengths.size(), UINT32_MAX));
  room.max_prompt_tokens = static_cast<uint32_t>(std::max<size_t>(longest, 1));
  room.max_new_tokens = options.max_new_tokens;
  room.full_depth = full_depth != 0 ? 1 : 0;
  return room;
}

}  // namespace

const char* skd_version(void) { return SKD_VERSION; }

skd_code skd_status_code(const skd_status* status) { return status == nullptr ? SKD_OK : status->code; }

const char* skd_status_message(const skd_status* status) { return status == nullptr ? "" : status->message.c_str(); }

void skd_status_destroy(skd_status* status) {
  if (status != &no_memory) delete status;
}

skd_load_options skd_load_options_default(void) { return {sizeof(skd_load_options), nullptr, 0, nullptr, 0}; }

skd_session_options skd_session_options_default(void) { return {sizeof(skd_session_options), 1, 0, 0, 0, nullptr, 0}; }

skd_row_options skd_row_options_default(void) { return {sizeof(skd_row_options), 64, 0, 1.0, 0, 1.0, 0, 0, 0}; }

skd_status* skd_bundle_load(const char* path, const skd_load_options* options, skd_bundle** bundle) {
  return Guarded([&] {
    Require(path != nullptr && bundle != nullptr, "path or bundle is NULL");
    const skd_load_options given = WithDefaults(options, skd_load_options_default());
    const auto target = given.target == nullptr ? std::nullopt : std::optional<std::string>(given.target);
    auto loaded = skd::LoadBundle(path, target, given.threads, TextOrEmpty(given.onnxruntime_library), given.no_cuda_graphs == 0);
    *bundle = new skd_bundle{std::move(loaded)};
  });
}

skd_status* skd_bundle_get_info(const skd_bundle* bundle, skd_bundle_info* info) {
  return Guarded([&] {
    Require(bundle != nullptr && info != nullptr, "bundle or info is NULL");
    const skd::Manifest& m = bundle->bundle->manifest;
    CopyOut({sizeof(skd_bundle_info), m.model.name.c_str(), m.dtype.c_str(), static_cast<uint32_t>(m.model.num_layers),
             static_cast<uint32_t>(m.variants.size()), static_cast<uint32_t>(m.segments.size()),
             static_cast<uint64_t>(m.model.vocab_size), static_cast<uint64_t>(m.limits.max_length),
             static_cast<uint64_t>(m.limits.max_batch), m.schedule.mean_layers(), bundle->bundle->load_s},
            info);
  });
}

void skd_bundle_destroy(skd_bundle* bundle) { delete bundle; }

skd_status* skd_session_create(const skd_bundle* bundle, const skd_session_options* options, skd_session** session) {
  return Guarded([&] {
    Require(bundle != nullptr && session != nullptr, "bundle or session is NULL");
    const skd_session_options given = WithDefaults(options, skd_session_options_default());
    Require(given.layers == nullptr || given.full_depth == 0, "layers and full_depth are both given");
    *session = new skd_session{skd::Session(bundle->bundle, given)};
  });
}

void skd_session_destroy(skd_session* session) { delete session; }

skd_status* skd_session_add(skd_session* session, const int64_t* prompt, size_t length, const skd_row_options* options,
                            uint64_t* row) {
  return Guarded([&] {
    Require(session != nullptr && row != nullptr && (prompt != nullptr || length == 0), "session, prompt or row is NULL");
    *row = session->session.Add(prompt, length, WithDefaults(options, skd_row_options_default()));
  });
}

skd_status* skd_session_begin(skd_session* session, const int64_t* prompt, size_t length, const skd_row_options* options,
                              uint64_t* row) {
  return Guarded([&] {
    Require(session != nullptr && row != nullptr && (prompt != nullptr || length == 0), "session, prompt or row is NULL");
    *row = session->session.Begin(prompt, length, WithDefaults(options, skd_row_options_default()));
  });
}

skd_status* skd_session_prefill(skd_session* session, uint32_t tokens, int* joined) {
  return Guarded([&] {
    Require(session != nullptr && joined != nullptr, "session or joined is NULL");
    *joined = session->session.RunPart(tokens) ? 1 : 0;
  });
}

skd_status* skd_session_step(skd_session* session, skd_event* events, size_t capacity, size_t* count) {
  return Guarded([&] {
    Require(session != nullptr && events != nullptr && count != nullptr, "session, events or count is NULL");
    Require(capacity >= static_cast<size_t>(session->session.max_rows()), "events has room for fewer than max_rows");
    const std::vector<skd_event>& found = session->session.Step();
    std::copy(found.begin(), found.end(), events);
    *count = found.size();
  });
}

skd_status* skd_session_cancel(skd_session* session, uint64_t row) {
  return Guarded([&] {
    Require(session != nullptr, "session is NULL");
    session->session.Cancel(row);
  });
}

skd_status* skd_session_logits(const skd_session* session, uint64_t row, const float** logits) {
  return Guarded([&] {
    Require(session != nullptr && logits != nullptr, "session or logits is NULL");
    *logits = session->session.Logits(row);
  });
}

skd_status* skd_session_get_counters(const skd_session* session, skd_counters* counters) {
  return Guarded([&] {
    Require(session != nullptr && counters != nullptr, "session or counters is NULL");
    CopyOut(session->session.Counters(), counters);
  });
}

skd_status* skd_generate(const skd_bundle* bundle, const int64_t* ids, const size_t* lengths, size_t rows,
                         const skd_row_options* options, int full_depth, skd_callback callback, void* user) {
  return Guarded([&] {
    if (rows == 0) throw skd::CapacityError("there is no prompt", "give at least one");
    Require(bundle != nullptr && ids != nullptr && lengths != nullptr && callback != nullptr, "an argument is NULL");
    const skd_row_options given = WithDefaults(options, skd_row_options_default());
    skd::CheckRows(*bundle->bundle, rows);  // before so many lengths are read
    const Prompts prompts = Split(ids, lengths, rows);
    skd::Session session(bundle->bundle, RoomFor(prompts, given, full_depth, bundle->bundle->manifest));
    for (size_t i = 0; i < rows; ++i) {
      session.Check(ids + prompts.starts[i], prompts.lengths[i], given, ("prompt " + std::to_string(i)).c_str());
    }
    for (size_t i = 0; i < rows; ++i) {
      skd_row_options row = given;
      row.generator_row += static_cast<uint32_t>(i);
      session.Add(ids + prompts.starts[i], prompts.lengths[i], row);  // rows of a new session are numbered from 0
    }
    for (std::vector<skd_event> events = session.Step(); !events.empty(); events = session.Step()) {
      for (const skd_event& event : events) {
        if (callback(user, &event) != 0 && event.finish == SKD_FINISH_NONE) session.Cancel(event.row);
      }
    }
  });
}

skd_status* skd_tokenizer_create(const skd_bundle* bundle, const char* genai_library, skd_tokenizer** tokenizer) {
  return Guarded([&] {
    Require(bundle != nullptr && tokenizer != nullptr, "bundle or tokenizer is NULL");
    *tokenizer = new skd_tokenizer{{bundle->bundle, TextOrEmpty(genai_library)}};
  });
}

void skd_tokenizer_destroy(skd_tokenizer* tokenizer) { delete tokenizer; }

skd_status* skd_tokenizer_encode(skd_tokenizer* tokenizer, const char* text, int64_t** ids, size_t* count) {
  return Guarded([&] {
    Require(tokenizer != nullptr && text != nullptr && ids != nullptr && count != nullptr, "an argument is NULL");
    const std::vector<int64_t> found = tokenizer->tokenizer.Encode(text);
    *ids = static_cast<int64_t*>(MallocCopy(found.data(), found.size() * sizeof(int64_t)));
    *count = found.size();
  });
}

skd_status* skd_tokenizer_decode(skd_tokenizer* tokenizer, const int64_t* ids, size_t count, char** text, size_t* length) {
  return Guarded([&] {
    Require(tokenizer != nullptr && text != nullptr && (ids != nullptr || count == 0), "an argument is NULL");
    const std::string found = tokenizer->tokenizer.Decode(ids, count);
    *text = static_cast<char*>(MallocCopy(found.c_str(), found.size() + 1));
    if (length != nullptr) *length = found.size();
  });
}

void skd_free(void* memory) { std::free(memory); }  // NOLINT(cppcoreguidelines-no-malloc)
