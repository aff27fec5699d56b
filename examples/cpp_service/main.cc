// skd_service BUNDLE [options]: the OpenAI completions API over a bundle.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "service.h"
#include "signals.h"

namespace {

constexpr char kHelp[] = R"(usage: skd_service BUNDLE [options]

  --host H               address to listen on (127.0.0.1)
  --port N               port to listen on; 0: any free one (8080)
  --rows N               rows that decode together, at most as many as the bundle allows (8)
  --queue N              rows that may wait; more are refused with 429 (64)
  --connections N        clients served at the same time; others wait (256)
  --max-prompt-tokens N  prompt tokens per row (half of the bundle's length)
  --max-new-tokens N     new tokens per row (the rest of the bundle's length)
  --max-prompt-bytes N   bytes per prompt text, checked before it is tokenised (32 times --max-prompt-tokens)
  --timeout-s N          seconds for a request that has arrived, waiting included (60)
  --arrival-s N          seconds for a request to arrive, from its connection to its last byte (10)
  --schedule full        compute every layer at every position, the baseline (the bundle's schedule)
  --target T             cpu or cuda (cpu, or cuda if the bundle has no cpu engines)
  --threads N            size of the process's thread pool (one thread per usable core)
  --onnxruntime-library F  libonnxruntime.so; for cuda, onnxruntime-gpu's
  --genai-library F      libonnxruntime-genai.so, used for its tokenizer

serves POST /v1/completions, GET /v1/models, /v1/models/NAME, /health, /metrics
exit status: 0 stopped, 1 cannot serve any more, 2 bad input (one line: what, where, what to do)
The first SIGTERM or SIGINT finishes running requests. One that comes a second or more later, or before the service listens,
ends it at once; the exit status is then the signal's.
)";

uint32_t ParseCount(const std::string& option, const std::string& text, uint32_t least = 0,
                    uint32_t most = std::numeric_limits<uint32_t>::max()) {
  const bool digits = !text.empty() && text.size() <= 10 && text.find_first_not_of("0123456789") == std::string::npos;
  if (!digits) throw std::runtime_error(option + ": '" + text + "' is not a count; see skd_service --help");
  const uint64_t count = std::stoull(text);
  if (count < least || count > most) {
    throw std::runtime_error(option + ": " + text + " is out of range; choose " + std::to_string(least) + ".." +
                             std::to_string(most));
  }
  return static_cast<uint32_t>(count);
}

// Handles an option's value.
using OptionHandler = std::function<void(const std::string& option, const std::string& value)>;

template <typename Text>
OptionHandler TextTo(Text* to) {
  return [to](const std::string&, const std::string& value) { *to = value; };
}

template <typename Number>
OptionHandler CountTo(Number* to, uint32_t least = 0, uint32_t most = std::numeric_limits<uint32_t>::max()) {
  return [=](const std::string& option, const std::string& value) {
    *to = static_cast<Number>(ParseCount(option, value, least, most));
  };
}

OptionHandler SecondsTo(std::chrono::milliseconds* to) {
  return [to](const std::string& option, const std::string& value) { *to = std::chrono::seconds(ParseCount(option, value, 1)); };
}

// Handles an option that has only this value.
OptionHandler OnlyValue(const char* only, bool* given) {
  return [=](const std::string& option, const std::string& value) {
    if (value != only) throw std::runtime_error(option + ": '" + value + "' is not known; choose " + only + ", or leave it out");
    *given = true;
  };
}

service::Settings ParseArguments(int count, char** arguments) {
  service::Settings settings;
  const std::map<std::string, OptionHandler> options = {{"--host", TextTo(&settings.host)},
                                                        {"--port", CountTo(&settings.port, 0, 65535)},
                                                        {"--rows", CountTo(&settings.rows, 1)},
                                                        {"--queue", CountTo(&settings.queue_length, 1)},
                                                        {"--connections", CountTo(&settings.connections, 1, 4096)},
                                                        {"--max-prompt-tokens", CountTo(&settings.max_prompt_tokens)},
                                                        {"--max-new-tokens", CountTo(&settings.max_new_tokens)},
                                                        {"--max-prompt-bytes", CountTo(&settings.max_prompt_bytes)},
                                                        {"--timeout-s", SecondsTo(&settings.timeout)},
                                                        {"--arrival-s", SecondsTo(&settings.arrival_timeout)},
                                                        {"--schedule", OnlyValue("full", &settings.full_depth)},
                                                        {"--target", TextTo(&settings.target)},
                                                        {"--threads", CountTo(&settings.threads)},
                                                        {"--onnxruntime-library", TextTo(&settings.onnxruntime_library)},
                                                        {"--genai-library", TextTo(&settings.genai_library)}};
  for (int i = 1; i < count; ++i) {
    const std::string option = arguments[i];
    if (option.rfind('-', 0) != 0) {
      if (!settings.bundle.empty()) throw std::runtime_error(option + ": one bundle at a time; see skd_service --help");
      settings.bundle = option;
      continue;
    }
    const auto known = options.find(option);
    if (known == options.end()) throw std::runtime_error(option + ": unknown option; see skd_service --help");
    if (i + 1 == count) throw std::runtime_error(option + ": needs a value; see skd_service --help");
    known->second(option, arguments[++i]);
  }
  if (settings.bundle.empty()) throw std::runtime_error("name a bundle; see skd_service --help");
  return settings;
}

// A library error's line, "where: what; remedy", with the struct fields it names replaced by this program's options. Only
// `where` and `remedy` are searched: `where` may be a field, `remedy` may name one, and the rest may hold paths.
std::string WithOptions(const skipdecode::Error& error) {
  static const std::pair<std::string, std::string> names[] = {{"skd_load_options.onnxruntime_library", "--onnxruntime-library"},
                                                              {"skd_tokenizer_create", "--genai-library"},
                                                              {"max_prompt_tokens", "--max-prompt-tokens"},
                                                              {"max_new_tokens", "--max-new-tokens"},
                                                              {"threads", "--threads"}};
  std::string line = error.what();
  const size_t remedy = std::min(line.rfind("; "), line.size());
  for (const auto& [field, option] : names) {
    const size_t at = line.find(field, remedy);
    if (at != std::string::npos) line.replace(at, field.size(), option);
    if (error.code() == SKD_ERROR_CAPACITY && line.rfind(field + ":", 0) == 0) line.replace(0, field.size(), option);
  }
  return line;
}

// Open what is closed of standard input, output and error: a client's connection would get its number, and read what is reported.
void OpenStandardStreams() {
  int opened = 0;
  while (opened >= 0 && opened <= STDERR_FILENO) opened = ::open("/dev/null", O_RDWR);
  if (opened >= 0) ::close(opened);
}

// Serve until asked to stop; returns the exit status.
int Run(const service::Settings& settings) {
  service::Signals signals;
  std::signal(SIGPIPE, SIG_IGN);  // writing to a client that is gone must not end the process
  service::Service service(settings);
  const int port = service.Bind();
  std::thread stopper([&] {
    signals.Wait();
    service.Stop();
  });
  signals.MarkServing();
  const bool ipv6 = settings.host.find(':') != std::string::npos;
  std::cout << "listening on http://" << (ipv6 ? "[" + settings.host + "]" : settings.host) << ":" << port << std::endl;
  int status = 0;
  try {
    service.Serve();
  } catch (const std::exception& error) {  // running requests are still finished
    std::cerr << error.what() << std::endl;
    status = 1;
    signals.RequestStop();
  }
  stopper.join();
  return status;
}

}  // namespace

int main(int count, char** arguments) {
  OpenStandardStreams();
  const auto asks_for_help = [](const std::string& argument) { return argument == "--help" || argument == "-h"; };
  if (std::any_of(arguments, arguments + count, asks_for_help)) {
    std::cout << kHelp;
    return 0;
  }
  setenv("ORT_DISABLE_TELEMETRY", "1", /*overwrite=*/0);  // before there are other threads, see docs/cpp.md
  try {
    return Run(ParseArguments(count, arguments));
  } catch (const std::system_error& error) {  // from std::thread; the service itself throws plain std::runtime_error
    std::cerr << "the system cannot start more threads (" << error.code().message()
              << "); choose fewer --connections or --threads, or raise its limits (ulimit -u, ulimit -v)\n";
    return 2;
  } catch (const skipdecode::Error& error) {
    std::cerr << WithOptions(error) << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
