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

void Metrics::CountFirstToken(double seconds) {
  const auto* bucket = std::lower_bound(kBucketBounds.begin(), kBucketBounds.end(), seconds);
  ++first_token_buckets.at(static_cast<size_t>(bucket - kBucketBounds.begin()));
  first_token_sum_us += static_cast<uint64_t>(seconds * 1e6);
}

std::string Metrics::Text() const {
  std::ostringstream page;
  page.precision(15);  // enough for a sum of microseconds over years
  Put(&page, "rows_accepted_total", "counter", "Rows taken into the queue.", accepted.load());
  Put(&page, "rows_rejected_total", "counter", "Rows refused because the queue was full.", rejected.load());
  Put(&page, "rows_completed_total", "counter", "Rows that ended by themselves, or by a stop string.", completed.load());
  Put(&page, "rows_cancelled_total", "counter", "Rows whose client went away.", cancelled.load());
  Put(&page, "rows_timed_out_total", "counter", "Rows that took too long.", timed_out.load());
  Put(&page, "rows_failed_total", "counter", "Rows that ended by an error of the engines, or for lack of memory.", failed.load());
  Put(&page, "tokens_total", "counter", "Tokens generated.", tokens.load());
  Put(&page, "decode_steps_total", "counter", "Decode steps of the whole batch.", decode_steps.load());
  Put(&page, "layers_total", "counter", "Layers that the deepest row of each decode step computed.", layers.load());
  Put(&page, "rows_queued", "gauge", "Rows that wait.", queued.load());
  Put(&page, "rows_running", "gauge", "Rows whose prompt runs, or that decode.", running.load());
  page << "# HELP skipdecode_first_token_seconds From arrival to first token.\n# TYPE skipdecode_first_token_seconds histogram\n";
  uint64_t cumulative = 0;
  for (size_t i = 0; i < kBucketBounds.size(); ++i) {
    cumulative += first_token_buckets.at(i);
    page << "skipdecode_first_token_seconds_bucket{le=\"" << kBucketBounds.at(i) << "\"} " << cumulative << '\n';
  }
  cumulative += first_token_buckets.back();
  page << "skipdecode_first_token_seconds_bucket{le=\"+Inf\"} " << cumulative << "\nskipdecode_first_token_seconds_sum "
       << static_cast<double>(first_token_sum_us) / 1e6 << "\nskipdecode_first_token_seconds_count " << cumulative << '\n';
  return page.str();
}

}  // namespace service
