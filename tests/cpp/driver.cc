// Runs JSON requests, one per line, through the C++ runtime, and answers each with one line of JSON. pytest compares the
// answers with Python's.
#include <dlfcn.h>
#include <onnxruntime_c_api.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <skipdecode/skipdecode.hpp>
#include <string>

namespace {

using Json = nlohmann::json;

skipdecode::Bundle Load(const Json& request) {
  skd_load_options options = skipdecode::LoadOptions();
  const std::string target = request.value("target", ""), library = request.value("onnxruntime_library", "");
  if (request.contains("target")) options.target = target.c_str();
  if (!library.empty()) options.onnxruntime_library = library.c_str();
  options.threads = request.value("threads", options.threads);
  options.no_cuda_graphs = request.value("cuda_graphs", true) ? 0 : 1;
  return skipdecode::Bundle::Load(request.at("bundle"), options);
}

// Loaded bundles, by path and whether CUDA graphs are used. Emptied before main returns, because CUDA's libraries are gone when
// static objects are destroyed.
std::map<std::string, skipdecode::Bundle>& Bundles() {
  static std::map<std::string, skipdecode::Bundle> bundles;
  return bundles;
}

const skipdecode::Bundle& Loaded(const Json& request) {
  auto& bundles = Bundles();
  const std::string key = request.at("bundle").get<std::string>() + (request.value("cuda_graphs", true) ? "" : " by calls");
  if (bundles.count(key) == 0) bundles.emplace(key, Load(request));
  return bundles.at(key);
}

skd_row_options RowOptions(const Json& request) {
  skd_row_options options = skipdecode::RowOptions();
  options.max_new_tokens = request.value("max_new_tokens", options.max_new_tokens);
  options.do_sample = request.value("do_sample", false) ? 1 : 0;
  options.temperature = request.value("temperature", options.temperature);
  options.top_k = request.value("top_k", options.top_k);
  options.top_p = request.value("top_p", options.top_p);
  options.seed = request.value("seed", options.seed);
  options.ignore_eos = request.value("ignore_eos", false) ? 1 : 0;
  return options;
}

Json Generate(const Json& request) {
  const auto prompts = request.at("prompts").get<std::vector<std::vector<int64_t>>>();
  const char* const reasons[] = {"none", "stop", "length"};
  Json sequences = Json::array();
  for (size_t i = 0; i < prompts.size(); ++i) sequences.push_back({{"token_ids", Json::array()}});
  Json layers = Json::array();
  bool step_told = true;
  uint64_t previous = 0;
  skipdecode::Generate(
      Loaded(request), prompts, RowOptions(request),
      [&](const skd_event& event) {
        sequences[event.row]["token_ids"].push_back(event.token);
        if (event.finish != SKD_FINISH_NONE) sequences[event.row]["finish_reason"] = reasons[event.finish];
        const uint64_t step = sequences[event.row]["token_ids"].size();
        step_told = step == previous;
        previous = step;
        if (event.prefill == 0 && !step_told) layers.push_back(event.layers);
        return true;
      },
      request.value("full_depth", false));
  return {{"sequences", sequences}, {"layers", layers}};
}

// A session's tokens, the layers of each decode step, the logits from which each token was chosen, except each row's last one,
// and how many engine runs were graph launches.
Json RunSession(const Json& request) {
  const auto prompts = request.at("prompts").get<std::vector<std::vector<int64_t>>>();
  const skipdecode::Bundle& bundle = Loaded(request);
  const uint64_t vocab_size = bundle.info().vocab_size;
  skd_session_options room = skipdecode::SessionOptions();
  room.max_rows = static_cast<uint32_t>(prompts.size());
  for (const auto& prompt : prompts)
    room.max_prompt_tokens = std::max(room.max_prompt_tokens, static_cast<uint32_t>(prompt.size()));
  const auto schedule = request.value("schedule", std::vector<uint32_t>());
  if (!schedule.empty()) room.layers = schedule.data();
  room.num_positions = schedule.size();
  skipdecode::Session session(bundle, room);
  Json logits = Json::array(), tokens = Json::array(), layers = Json::array();
  const auto take = [&](uint64_t row) {
    const float* found = session.Logits(row);
    logits[row].push_back(std::vector<float>(found, found + vocab_size));
  };
  for (const auto& prompt : prompts) take(session.Add(prompt, RowOptions(request)));
  for (auto events = session.Step(); !events.empty(); events = session.Step()) {
    if (events.front().prefill == 0) layers.push_back(events.front().layers);
    for (const skd_event& event : events) {
      tokens[event.row].push_back(event.token);
      if (event.prefill == 0 && event.finish == SKD_FINISH_NONE) take(event.row);
    }
  }
  return {{"token_ids", tokens}, {"layers", layers}, {"logits", logits}, {"graph_launches", session.counters().graph_launches}};
}

Json Tokenize(const Json& request) {
  const std::string library = request.value("genai_library", "");
  skipdecode::Tokenizer tokenizer(Loaded(request), library.empty() ? nullptr : library.c_str());
  Json answer = {{"ids", Json::array()}, {"texts", Json::array()}, {"streamed", Json::array()}};
  for (const auto& text : request.at("texts")) {
    const std::vector<int64_t> ids = tokenizer.Encode(text.get<std::string>());
    answer["ids"].push_back(ids);
    answer["texts"].push_back(tokenizer.Decode(ids.data(), ids.size()));
    skipdecode::TextStream stream(tokenizer);
    std::string streamed;
    for (const int64_t id : ids) streamed += stream.Add(id);
    answer["streamed"].push_back(streamed + stream.End());
  }
  answer["pieces"] = Json::array();
  answer["whole"] = Json::array();
  for (const auto& ids : request.value("ids", std::vector<std::vector<int64_t>>())) {
    skipdecode::TextStream stream(tokenizer);
    std::vector<std::string> pieces;
    for (const int64_t id : ids) pieces.push_back(stream.Add(id));
    pieces.push_back(stream.End());
    answer["pieces"].push_back(pieces);
    answer["whole"].push_back(tokenizer.Decode(ids.data(), ids.size()));
  }
  return answer;
}

Json Info(const Json& request) {
  const skd_bundle_info info = Load(request).info();
  return {{"name", info.name},
          {"num_layers", info.num_layers},
          {"num_variants", info.num_variants},
          {"max_length", info.max_length},
          {"mean_layers", info.mean_layers},
          {"vocab_size", info.vocab_size}};
}

// Make an ONNX Runtime environment, as an application that uses ONNX Runtime itself does.
Json MakeEnvironment(const Json& request) {
  void* library = dlopen(request.at("library").get<std::string>().c_str(), RTLD_NOW);
  const auto base = reinterpret_cast<const OrtApiBase* (*)()>(dlsym(library, "OrtGetApiBase"));
  const OrtApi* api = base()->GetApi(ORT_API_VERSION);
  OrtEnv* environment = nullptr;  // never destroyed
  OrtThreadingOptions* pools = nullptr;
  const bool made = request.at("global_pools").get<bool>()
                        ? api->CreateThreadingOptions(&pools) == nullptr &&
                              api->CreateEnvWithGlobalThreadPools(ORT_LOGGING_LEVEL_ERROR, "app", pools, &environment) == nullptr
                        : api->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "app", &environment) == nullptr;
  return {{"made", made}};
}

Json Answer(const Json& request) {
  const std::string command = request.at("command");
  if (command == "generate") return Generate(request);
  if (command == "session") return RunSession(request);
  if (command == "tokenize") return Tokenize(request);
  if (command == "make_environment") return MakeEnvironment(request);
  return Info(request);
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    Json answer;
    try {
      answer = Answer(Json::parse(line));
    } catch (const skipdecode::Error& error) {
      answer = {{"code", error.code()}, {"error", error.what()}};
    }
    std::cout << answer.dump(-1, ' ', true, Json::error_handler_t::replace) << std::endl;
  }
  Bundles().clear();
}
