#include "token_ids.h"

#include <algorithm>

#include "error.h"

namespace skd {

void CheckIds(const Model& model, const int64_t* ids, size_t count, const std::string& where) {
  const auto outside = std::find_if(ids, ids + count, [&model](int64_t id) { return id < 0 || id >= model.vocab_size; });
  if (outside == ids + count) return;
  throw CapacityError("token id " + std::to_string(*outside) + " is outside the vocabulary",
                      "give ids from 0 to " + std::to_string(model.vocab_size - 1), where);
}

}  // namespace skd
