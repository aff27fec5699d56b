// A stand-in for the library, whose sessions fail on demand.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "skipdecode/skipdecode.h"

struct StandinLibrary {
  std::atomic<bool> slow_session{false}, no_memory{false}, gpu_lost{false}, engines_fail{false}, row_lost{false};
  std::atomic<bool> endless{false};                          // rows do not end with their first token
  std::atomic<int> begin_fails{SKD_OK}, part_fails{SKD_OK};  // with that code
  std::atomic<int> prompt_parts{1};                          // of a prompt
  std::atomic<int> part_ms{0};                               // that a part takes
  std::atomic<int> sessions{0}, most_sessions{0}, sessions_made{0};
  std::atomic<int64_t> token{7};  // that every step gives each row
  size_t num_decoded_ids = 0;     // ids that were decoded
  // to be read after the batcher's thread has ended
  std::vector<uint32_t> generator_rows;  // of the rows that have begun
  // p: a part of a prompt ran, and it was not the last; a: a row joined; f: a step gave first tokens; d: it decoded
  std::string calls;

  // Nothing fails any more. Sessions live on.
  void Reset();
  // The calls, without repeated steps.
  std::string Order() const;
};

extern StandinLibrary library;
