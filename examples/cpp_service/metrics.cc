#include "metrics.h"

#include <algorithm>
#include <sstream>

namespace service {
namespace {

template <typename Value>
void Put(std::ostringstream* page, const char* name, const char* type, const char* help, const Value& value) {
  *page << "# HELP skipdecode_" << name << ' ' << help << "\n# TYPE skipdecode_" << name << ' ' << type << "\nskipdecode_" << name
        << ' ' << value << '\n';
}

}  // namespace

void Metrics::FirstToken(double seconds) {
  const auto* bucket = std::lower_bound(kBounds.begin(), kBounds.end(), seconds);
  ++first_token.at(static_cast<size_t>(bucket - kBounds.begin()));
  first_token_us += static_cast<uint64_t>(seconds * 1e6);
}

std::string Metrics::Text() const {
  std::ostringstream page;
  page.precision(15);  // enough for a sum of microseconds over years
  Put(&page, "rows_accepted_total", "counter", "Rows taken into the queue.", accepted.load());
  Put(&page, "rows_rejected_total", "counter", "Rows refused because the queue was full.", rejected.load());
  Put(&page, "rows_completed_total", "counter", "Rows that ended by themselves, or by a stop string.", completed.load());
  Put(&page, "rows_cancelled_total", "counter", "Rows whose client went away.", cancelled.load());
  Put(&page, "rows_timed_out_total", "counter", "Rows that took too long.", timed_out.load());
  Put(&page, "rows_failed_total", "counter", "Rows that ended by an error of the engines, or for want of memory.", failed.load());
  Put(&page, "tokens_total", "counter", "Tokens generated.", tokens.load());
  Put(&page, "decode_steps_total", "counter", "Decode steps of the whole batch.", decode_steps.load());
  Put(&page, "layers_total", "counter", "Layers that the deepest row of each decode step computed.", layers.load());
  Put(&page, "rows_queued", "gauge", "Rows that wait.", queued.load());
  Put(&page, "rows_running", "gauge", "Rows that decode.", running.load());
  page << "# HELP skipdecode_first_token_seconds From arrival to first token.\n# TYPE skipdecode_first_token_seconds histogram\n";
  uint64_t sum = 0;
  for (size_t i = 0; i < kBounds.size(); ++i) {
    sum += first_token.at(i);
    page << "skipdecode_first_token_seconds_bucket{le=\"" << kBounds.at(i) << "\"} " << sum << '\n';
  }
  sum += first_token.back();
  page << "skipdecode_first_token_seconds_bucket{le=\"+Inf\"} " << sum << "\nskipdecode_first_token_seconds_sum "
       << static_cast<double>(first_token_us) / 1e6 << "\nskipdecode_first_token_seconds_count " << sum << '\n';
  return page.str();
}

}  // namespace service
