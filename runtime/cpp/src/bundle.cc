#include "bundle.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <future>
#include <mutex>
#include <optional>
#include <system_error>
#include <utility>

#include "bindings.h"
#include "cores.h"
#include "cpu_features.h"
#include "error.h"
#include "process_memory.h"
#include "turn_around.h"

namespace skd {
namespace {

std::string Joined(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) line += (line.empty() ? "" : " ") + word;
  return line;
}

// `asked`: nullopt means cpu, or cuda if the bundle has no cpu engines.
const Target& ChooseTarget(const Manifest& manifest, const std::filesystem::path& path, const std::optional<std::string>& asked) {
  const auto& targets = manifest.targets;
  const auto named = [&targets](const std::string& name) {
    return std::find_if(targets.begin(), targets.end(), [&name](const Target& target) { return target.name == name; });
  };
  const std::string name = asked.value_or("cpu");
  auto found = named(name);
  if (!asked && found == targets.end()) found = named("cuda");
  if (!asked && found == targets.end()) found = targets.begin();
  if (found == targets.end()) {
    std::vector<std::string> known;
    known.reserve(targets.size());
    for (const Target& target : targets) known.push_back(target.name);
    throw TargetError("target '" + name + "' is not in this bundle", "choose from " + (known.empty() ? "none" : Joined(known)),
                      path.string());
  }
  if ((found->name != "cpu" && found->name != "cuda") || found->library != "onnxruntime") {
    throw TargetError("this library runs cpu and cuda engines, not " + found->name, "export with --target cpu too",
                      path.string());
  }
  return *found;
}

// Prepacked weights fit only the ONNX Runtime version that wrote them, and CPUs with the same instruction sets.
void CheckVersion(const Target& target, const std::filesystem::path& path) {
  if (const std::string version = OnnxRuntimeVersion(); version != target.library_version) {
    throw TargetError("the engines were compiled by onnxruntime " + target.library_version + ", but " + version + " is loaded",
                      "load onnxruntime " + target.library_version + " or export the model again", path.string());
  }
}

void CheckProcessor(const Target& target, const std::filesystem::path& path) {
  if (target.machine != Machine() || target.cpu_features != CpuFeatures()) {
    throw TargetError(
        "the engines' weights are laid out for " + target.machine + " with " + Joined(target.cpu_features) + "; this CPU differs",
        "export the model on this machine", path.string());
  }
}

// Loads as many engines at a time as there are cores, or fewer if the system starts no more threads. Loading takes the CPU's
// time because ONNX Runtime packs quantised weights again, to compare them with the stored ones.
std::vector<Engine> LoadEngines(const std::vector<std::filesystem::path>& files, Device device, bool compiled, bool cuda_graphs) {
  std::vector<std::optional<Engine>> loaded(files.size());
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < files.size(); i = next++) loaded[i].emplace(files[i], device, compiled, cuda_graphs);
  };
  std::vector<std::future<void>> others(std::min(files.size(), static_cast<size_t>(UsableCores())) - 1);
  try {
    for (std::future<void>& other : others) other = std::async(std::launch::async, work);
  } catch (const std::system_error&) {  // the system starts no more threads: do with those running and this one
  }
  work();  // if this throws, the futures' destructors wait for the other threads
  for (const std::future<void>& other : others) {
    if (other.valid()) other.wait();  // for all of them, before get() may throw
  }
  for (std::future<void>& other : others) {
    if (other.valid()) other.get();
  }
  std::vector<Engine> engines;
  engines.reserve(loaded.size());
  for (std::optional<Engine>& engine : loaded) engines.push_back(std::move(*engine));
  return engines;
}

// Reads a file of `bytes` bytes into the engines' memory.
Block ReadWeight(const std::filesystem::path& path, const Memory& memory, size_t bytes) {
  Block weight = memory.Allocate(bytes);
  std::ifstream file(path, std::ios::binary);
  std::vector<char> part(std::min(bytes, size_t{16} << 20));
  for (size_t done = 0; done < bytes; done += part.size()) {
    part.resize(std::min(part.size(), bytes - done));
    if (!file.read(part.data(), static_cast<std::streamsize>(part.size()))) throw BundleError("cannot be read", path.string());
    memory.Send(weight.get() + done, part.data(), part.size());
    memory.WaitForAll();  // a GPU that reads the host's pages itself may not have read `part` yet
  }
  return weight;
}

// Reads the weight that both engines share, binds it to them and returns its memory.
Block ShareTiedWeight(const std::filesystem::path& path, const Model& model, const Memory& memory, Engine* embed, Engine* head) {
  const size_t bytes = std::filesystem::file_size(path);
  const int64_t rows = TiedRows(model);
  const size_t column = static_cast<size_t>(rows) * memory.float_size();
  if (bytes == 0 || bytes % column != 0) throw BundleError("is not a whole number of rows", path.string());
  Block weight = ReadWeight(path, memory, bytes);
  const Tensor shared = memory.Floats(names::kTiedWeight, weight.get(), {rows, static_cast<int64_t>(bytes / column)});
  embed->Share(shared);
  head->Share(shared);
  return weight;
}

std::unique_ptr<const Bundle> Load(const std::filesystem::path& path, const Identity& identity,
                                   const std::optional<std::string>& target_name, uint32_t threads,
                                   const std::string& onnxruntime_library, bool cuda_graphs, std::optional<Device> asked_device) {
  const auto began = std::chrono::steady_clock::now();
  Manifest manifest = ReadManifest(path);
  const Target target = ChooseTarget(manifest, path, target_name);
  const bool for_cpu = target.name == "cpu";  // compiled by the export, in fp32; other engines are compiled here
  const Device device = asked_device.value_or(for_cpu ? Device::kCpu : Device::kCuda);
  UseOnnxRuntime(onnxruntime_library, threads, [&] {
    CheckProvider(device);
    if (for_cpu) CheckVersion(target, path);
  });
  if (device == Device::kCuda) TurnAroundKernel();  // the driver takes a while to compile it, unless it has done so before
  if (for_cpu) CheckProcessor(target, path);
  std::vector<std::filesystem::path> files{path / target.embed, path / target.head};
  for (const std::string& file : target.segments) files.push_back(path / file);
  std::vector<Engine> engines = LoadEngines(files, device, for_cpu, cuda_graphs);
  Engine& embed = engines[0];
  Engine& head = engines[1];
  const Memory memory(device, for_cpu ? "float32" : manifest.dtype);
  CheckBindings(embed, EmbedBindings(memory, manifest.model), files[0].string());
  CheckBindings(head, HeadBindings(memory, manifest.model), files[1].string());
  std::vector<SegmentEngine> segments;
  segments.reserve(target.segments.size());
  for (size_t i = 0; i < target.segments.size(); ++i) {
    Engine& engine = engines[i + 2];
    CheckBindings(engine, SegmentBindings(memory, manifest.model, manifest.segments[i]), files[i + 2].string());
    segments.push_back({manifest.segments[i], std::move(engine)});
  }
  Block tied_weight(nullptr, nullptr);
  if (!for_cpu && target.tied_weight) {
    tied_weight = ShareTiedWeight(path / *target.tied_weight, manifest.model, memory, &embed, &head);
  }
  std::vector<std::filesystem::path> listed;
  listed.reserve(manifest.files.size());
  for (const File& file : manifest.files) listed.push_back(path / file.path);
  ReleaseLoadingMemory(listed);
  const std::chrono::duration<double> load_s = std::chrono::steady_clock::now() - began;
  return std::unique_ptr<const Bundle>(new Bundle{std::filesystem::absolute(path), identity, std::move(manifest), memory,
                                                  std::move(tied_weight), std::move(embed), std::move(segments), std::move(head),
                                                  load_s.count()});
}

// Held while bundles are loaded and destroyed: a mapping that ReleaseLoadingMemory has found must not be unmapped, and its
// address reused, before it is given back.
std::mutex mapping_mutex;

struct Unmap {
  void operator()(const Bundle* bundle) const {
    const std::lock_guard lock(mapping_mutex);
    delete bundle;
  }
};

}  // namespace

std::shared_ptr<const Bundle> LoadBundle(const std::filesystem::path& path, const std::optional<std::string>& target,
                                         uint32_t threads, const std::string& onnxruntime_library, bool cuda_graphs,
                                         std::optional<Device> device) {
  std::unique_ptr<const Bundle, Unmap> loaded;
  {
    const std::lock_guard lock(mapping_mutex);
    const Identity identity = IdentityOf(path);
    ReadUnchanged(path, identity, "while it was loaded", [&] {
      loaded.reset(Load(path, identity, target, threads, onnxruntime_library, cuda_graphs, device).release());
    });
  }
  return loaded;  // after the lock, which Unmap takes if there is no memory for the shared_ptr
}

}  // namespace skd
