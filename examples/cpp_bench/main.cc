// How fast does a bundle decode at batch 1, and where does the time go? benchmarks/cpp.py compares it with the Python runtime.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>
#include <skipdecode/skipdecode.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr char kUsage[] = "usage: skd_bench BUNDLE [PROMPT_TOKENS NEW_TOKENS ROUNDS [calls]]\n";
constexpr char kHelp[] = R"(
how fast does a bundle decode at batch 1 (32 65 7), and where does the time go? full depth and the bundle's schedule take turns
calls: on a GPU, without CUDA graphs

one JSON object on standard output: medians, units in the keys
exit status: 0 measured, 2 bad input (one line: what, where, what to do)
)";

uint32_t ParseCount(const char* name, const std::string& text, uint32_t least) {
  const bool digits = !text.empty() && text.size() <= 9 && text.find_first_not_of("0123456789") == std::string::npos;
  if (digits && std::stoul(text) >= least) return static_cast<uint32_t>(std::stoul(text));
  throw std::runtime_error(std::string(name) + ": '" + text + "' is out of range; choose " + std::to_string(least) +
                           "..999999999");
}

struct Figures {
  std::vector<double> token_ms, outside_engines_us, prefill_ms, graph_launches;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void MeasureDecode(const skipdecode::Bundle& bundle, uint32_t prompt_tokens, uint32_t new_tokens, bool full_depth,
                   Figures* figures) {
  skd_session_options room = skipdecode::SessionOptions();
  room.max_prompt_tokens = prompt_tokens;
  room.max_new_tokens = new_tokens;
  room.full_depth = full_depth ? 1 : 0;
  skd_row_options options = skipdecode::RowOptions();
  options.max_new_tokens = new_tokens;
  options.ignore_eos = 1;
  skipdecode::Session session(bundle, room);
  session.Add(std::vector<int64_t>(prompt_tokens, 5), options);
  while (!session.Step().empty()) {
  }
  const skd_counters counters = session.counters();
  const auto steps = static_cast<double>(counters.decode_steps);
  figures->token_ms.push_back(static_cast<double>(counters.decode_ns) / steps / 1e6);
  figures->outside_engines_us.push_back(static_cast<double>(counters.decode_ns - counters.decode_engine_ns) / steps / 1e3);
  figures->prefill_ms.push_back(static_cast<double>(counters.prefill_ns) / 1e6);
  figures->graph_launches.push_back(static_cast<double>(counters.graph_launches) / steps);
}

nlohmann::json ToJson(const Figures& figures) {
  return {{"token_ms", Median(figures.token_ms)},
          {"outside_engines_us_per_step", Median(figures.outside_engines_us)},
          {"graph_launches_per_step", Median(figures.graph_launches)},
          {"prefill_ms", Median(figures.prefill_ms)}};
}

}  // namespace

int main(int count, char** arguments) {
  if (std::find(arguments, arguments + count, std::string("--help")) != arguments + count) {
    std::cout << kUsage << kHelp;
    return 0;
  }
  const bool no_graphs = count == 6 && std::string(arguments[5]) == "calls";
  if (count != 2 && count != 5 && !no_graphs) {
    std::cerr << kUsage;
    return 2;
  }
  setenv("ORT_DISABLE_TELEMETRY", "1", /*overwrite=*/0);  // before there are other threads, see docs/cpp.md
  try {
    const uint32_t prompt_tokens = count >= 5 ? ParseCount("PROMPT_TOKENS", arguments[2], 1) : 32;
    const uint32_t new_tokens = count >= 5 ? ParseCount("NEW_TOKENS", arguments[3], 2) : 65;  // the first comes from the prompt
    const uint32_t rounds = count >= 5 ? ParseCount("ROUNDS", arguments[4], 1) : 7;
    skd_load_options options = skipdecode::LoadOptions();
    options.no_cuda_graphs = no_graphs ? 1 : 0;
    const auto bundle = skipdecode::Bundle::Load(arguments[1], options);
    Figures full, scheduled, warm_up;
    for (const bool full_depth : {true, false}) MeasureDecode(bundle, prompt_tokens, new_tokens, full_depth, &warm_up);
    for (uint32_t round = 0; round < rounds; ++round) {
      MeasureDecode(bundle, prompt_tokens, new_tokens, true, &full);
      MeasureDecode(bundle, prompt_tokens, new_tokens, false, &scheduled);
    }
    std::cout << nlohmann::json{{"load_s", bundle.info().load_s}, {"full", ToJson(full)}, {"scheduled", ToJson(scheduled)}}.dump()
              << '\n';
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
