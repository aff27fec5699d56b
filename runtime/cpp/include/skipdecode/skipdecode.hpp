// skipdecode.hpp: skipdecode.h for C++17, header only. Handles are move-only and release what they own; failures throw
// skipdecode::Error. The rules of skipdecode.h on threads, lifetimes and options hold here too.
//
//   #include <skipdecode/skipdecode.hpp>
//   #include <iostream>
//
//   int main(int, char** arguments) {
//     const auto bundle = skipdecode::Bundle::Load(arguments[1]);
//     skipdecode::Tokenizer tokenizer(bundle);
//     skipdecode::TextStream text(tokenizer);
//     skipdecode::Generate(bundle, {tokenizer.Encode(arguments[2])}, skipdecode::RowOptions(), [&](const skd_event& event) {
//       std::cout << text.Add(event.token) << std::flush;
//       return true;
//     });
//     std::cout << text.End() << std::endl;
//   }
#ifndef SKIPDECODE_SKIPDECODE_HPP_
#define SKIPDECODE_SKIPDECODE_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "skipdecode/skipdecode.h"

namespace skipdecode {

// A failure: code() tells its kind, what() is one line that ends with what to do.
class Error : public std::runtime_error {
 public:
  Error(skd_code code, const char* message) : std::runtime_error(message), code_(code) {}
  skd_code code() const { return code_; }

 private:
  skd_code code_;
};

namespace internal {

inline void Check(skd_status* status) {
  if (status == nullptr) return;
  const std::unique_ptr<skd_status, void (*)(skd_status*)> owner(status, skd_status_destroy);
  throw Error(skd_status_code(status), skd_status_message(status));
}

template <typename Handle, void (*Destroy)(Handle*)>
struct Deleter {
  void operator()(Handle* handle) const { Destroy(handle); }
};

template <typename Handle, void (*Destroy)(Handle*)>
using Owned = std::unique_ptr<Handle, Deleter<Handle, Destroy>>;

}  // namespace internal

inline skd_load_options LoadOptions() { return skd_load_options_default(); }
inline skd_session_options SessionOptions() { return skd_session_options_default(); }
inline skd_row_options RowOptions() { return skd_row_options_default(); }

// A loaded bundle. May be shared by threads.
class Bundle {
 public:
  static Bundle Load(const std::string& path, const skd_load_options& options = LoadOptions()) {
    skd_bundle* handle = nullptr;
    internal::Check(skd_bundle_load(path.c_str(), &options, &handle));
    return Bundle(handle);
  }
  skd_bundle_info info() const {
    skd_bundle_info info{};
    info.struct_size = sizeof info;
    internal::Check(skd_bundle_get_info(get(), &info));
    return info;
  }
  const skd_bundle* get() const { return handle_.get(); }

 private:
  explicit Bundle(skd_bundle* handle) : handle_(handle) {}
  internal::Owned<skd_bundle, skd_bundle_destroy> handle_;
};

// Rows that decode together. For one thread at a time. Keeps the bundle alive.
class Session {
 public:
  explicit Session(const Bundle& bundle, const skd_session_options& options = SessionOptions()) : max_rows_(options.max_rows) {
    skd_session* handle = nullptr;
    internal::Check(skd_session_create(bundle.get(), &options, &handle));
    handle_.reset(handle);
    events_.reserve(max_rows_);
  }
  // Run a prompt's prefill; returns the id of its row, which joins the next decode step.
  uint64_t Add(const std::vector<int64_t>& prompt, const skd_row_options& options = RowOptions()) {
    uint64_t row = 0;
    internal::Check(skd_session_add(handle_.get(), prompt.data(), prompt.size(), &options, &row));
    return row;
  }
  // The same in parts: other rows may step while Prefill has not yet returned true.
  uint64_t Begin(const std::vector<int64_t>& prompt, const skd_row_options& options = RowOptions()) {
    uint64_t row = 0;
    internal::Check(skd_session_begin(handle_.get(), prompt.data(), prompt.size(), &options, &row));
    return row;
  }
  // Run the next part, at most as much work as a prompt of `tokens` tokens is; 0: so much that a step between two parts costs
  // little. Returns whether the row has joined the others.
  bool Prefill(uint32_t tokens = 0) {
    int joined = 0;
    internal::Check(skd_session_prefill(handle_.get(), tokens, &joined));
    return joined != 0;
  }
  // Deliver the first tokens of newly added rows or, if there are none, run one decode step of all rows. Empty: no row is
  // left, but for one whose prompt is under way. The result is valid until the next call.
  const std::vector<skd_event>& Step() {
    size_t count = 0;
    events_.resize(max_rows_);
    internal::Check(skd_session_step(handle_.get(), events_.data(), events_.size(), &count));
    events_.resize(count);
    return events_;
  }
  void Cancel(uint64_t row) { internal::Check(skd_session_cancel(handle_.get(), row)); }
  // The logits [V] that the row's newest token was chosen from; valid until the session's next call.
  const float* Logits(uint64_t row) const {
    const float* logits = nullptr;
    internal::Check(skd_session_logits(handle_.get(), row, &logits));
    return logits;
  }
  skd_counters counters() const {
    skd_counters counters{};
    counters.struct_size = sizeof counters;
    internal::Check(skd_session_get_counters(handle_.get(), &counters));
    return counters;
  }

 private:
  internal::Owned<skd_session, skd_session_destroy> handle_;
  size_t max_rows_;
  std::vector<skd_event> events_;
};

// Generate for all prompts. `each` receives every token, on this thread, and returns false to end the token's row. An
// exception that it throws ends all rows and is rethrown.
inline void Generate(const Bundle& bundle, const std::vector<std::vector<int64_t>>& prompts, const skd_row_options& options,
                     const std::function<bool(const skd_event&)>& each, bool full_depth = false) {
  struct State {
    const std::function<bool(const skd_event&)>* each;
    std::exception_ptr thrown;
  } state{&each, nullptr};
  const skd_callback callback = [](void* user, const skd_event* event) -> int {
    auto* seen = static_cast<State*>(user);
    if (seen->thrown) return 1;
    try {
      return (*seen->each)(*event) ? 0 : 1;
    } catch (...) {  // must not pass through the C functions
      seen->thrown = std::current_exception();
      return 1;
    }
  };
  std::vector<int64_t> ids;
  std::vector<size_t> lengths;
  for (const auto& prompt : prompts) {
    ids.insert(ids.end(), prompt.begin(), prompt.end());
    lengths.push_back(prompt.size());
  }
  ids.reserve(1);  // so that data() is not NULL even without ids
  internal::Check(
      skd_generate(bundle.get(), ids.data(), lengths.data(), lengths.size(), &options, full_depth ? 1 : 0, callback, &state));
  if (state.thrown) std::rethrow_exception(state.thrown);
}

// The bundle's tokenizer. May be shared by threads, whose calls take turns. Keeps the bundle alive.
class Tokenizer {
 public:
  explicit Tokenizer(const Bundle& bundle, const char* genai_library = nullptr) {
    skd_tokenizer* handle = nullptr;
    internal::Check(skd_tokenizer_create(bundle.get(), genai_library, &handle));
    handle_.reset(handle);
  }
  std::vector<int64_t> Encode(const std::string& text) const {
    if (text.find('\0') != std::string::npos) {
      throw Error(SKD_ERROR_CAPACITY, "the text holds a NUL character, which would end it; leave it out");
    }
    int64_t* ids = nullptr;
    size_t count = 0;
    internal::Check(skd_tokenizer_encode(handle_.get(), text.c_str(), &ids, &count));
    const std::unique_ptr<int64_t, void (*)(void*)> owner(ids, skd_free);
    return {ids, ids + count};
  }
  std::string Decode(const int64_t* ids, size_t count) const {
    char* text = nullptr;
    size_t length = 0;
    internal::Check(skd_tokenizer_decode(handle_.get(), ids, count, &text, &length));
    const std::unique_ptr<char, void (*)(void*)> owner(text, skd_free);
    return {text, length};
  }

 private:
  internal::Owned<skd_tokenizer, skd_tokenizer_destroy> handle_;
};

// Text of tokens that arrive one by one. Add returns the characters that are complete by now, possibly none; End returns what
// is still waiting for more tokens. Decoding starts at the piece returned last, because a token's text depends on the token
// before it. Once 32 tokens wait, Add no longer decodes at every token, so text may come late by up to 1/32 of the number of
// waiting tokens. The tokenizer must outlive the stream and must not be moved meanwhile.
class TextStream {
 public:
  explicit TextStream(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}
  explicit TextStream(const Tokenizer&& tokenizer) = delete;  // a temporary would not outlive the stream
  std::string Add(int64_t token) {
    ids_.push_back(token);
    if (ids_.size() < next_decode_size_) return {};
    std::string piece = Rest();
    constexpr char kReplacement[] = "\xEF\xBF\xBD";  // for bytes that are not a character, or not yet
    const bool whole = piece.size() < 3 || piece.compare(piece.size() - 3, 3, kReplacement) != 0;
    if (piece.empty() || !whole) {
      // decoding all waiting tokens again for each new one would take quadratic time
      next_decode_size_ = ids_.size() + 1 + (ids_.size() - returned_) / kDecodeEachUpTo;
      return {};
    }
    ids_.erase(ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(returned_));
    returned_ = ids_.size();
    next_decode_size_ = 0;
    return piece;
  }
  std::string End() {
    std::string piece = Rest();
    returned_ = ids_.size();
    next_decode_size_ = 0;
    return piece;
  }

 private:
  static constexpr size_t kDecodeEachUpTo = 32;  // while fewer tokens wait, each Add decodes them; then ever fewer do

  static bool Starts(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }  // a character in UTF-8
  // The text after the piece returned last. Counts characters, since bytes that were text may become part of an invalid run.
  std::string Rest() {
    const std::string before = tokenizer_->Decode(ids_.data(), returned_), now = tokenizer_->Decode(ids_.data(), ids_.size());
    auto returned = std::count_if(before.begin(), before.end(), Starts);
    return {std::find_if(now.begin(), now.end(), [&returned](char byte) { return Starts(byte) && returned-- == 0; }), now.end()};
  }

  const Tokenizer* tokenizer_;
  std::vector<int64_t> ids_;     // tokens of the piece returned last, and those added since
  size_t returned_ = 0;          // how many of them belong to that piece
  size_t next_decode_size_ = 0;  // size of ids_ from which Add decodes again
};

}  // namespace skipdecode

#endif  // SKIPDECODE_SKIPDECODE_HPP_
