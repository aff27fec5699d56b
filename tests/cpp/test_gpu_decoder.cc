// The decoder as on a GPU: its memory and stream, where engines run in order, belong to the stand-in for NVIDIA's driver.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "bundle.h"
#include "catch.h"
#include "decoder.h"
#include "device_bundles.h"
#include "error.h"
#include "gpu_engines.h"
#include "standin_driver.h"

namespace {

using Logits = std::vector<std::vector<float>>;

constexpr auto kIgnore = [](int64_t, int64_t) {};

// Rows that join and leave, with enough steps for graphs.
class Run {
 public:
  explicit Run(const std::shared_ptr<const skd::Bundle>& bundle)
      : decoder_(bundle, bundle->manifest.schedule, 3, 8, 16), vocab_size_(bundle->manifest.model.vocab_size) {
    Add(kPrompts[0]);
    Step(2);
    Add(kPrompts[1]);
    Add(kPrompts[2]);
    Step(3);
    decoder_.Remove(1, kIgnore);
    Step(2);
    Add(kPrompts[3]);
    Step(6);
  }
  // The logits of each row after each of these calls.
  const Logits& logits() const { return logits_; }
  uint64_t graph_launches() const { return decoder_.graph_launches(); }

 private:
  void Add(const Tokens& prompt) {
    decoder_.Add(prompt.data(), static_cast<int64_t>(prompt.size()), kIgnore);
    Collect();
  }
  void Step(int count) {
    const Tokens tokens(static_cast<size_t>(decoder_.rows()), 7);
    for (int step = 0; step < count; ++step) {
      decoder_.Step(tokens.data());
      Collect();
    }
  }
  void Collect() {
    for (int64_t row = 0; row < decoder_.rows(); ++row) {
      logits_.emplace_back(decoder_.Logits(row), decoder_.Logits(row) + vocab_size_);
    }
  }

  skd::Decoder decoder_;
  int64_t vocab_size_;
  Logits logits_;
};

// The tied weight, read from the bundle's file.
std::string TiedWeight(const skd::Bundle& bundle) {
  const auto& targets = bundle.manifest.targets;
  const auto cuda = std::find_if(targets.begin(), targets.end(), [](const skd::Target& each) { return each.name == "cuda"; });
  std::ifstream file(bundle.path / cuda->tied_weight.value(), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

TEST_CASE("a weight arrives intact even if the GPU reads the host's memory only when the copy's turn comes") {
  skd::UseOnnxRuntime("", 2);
  const GpuEngines engines;
  int* const reads_late = Driver<int>("standin_reads_host_pages");
  *reads_late = 1;
  const auto bundle = skd::LoadBundle(DeviceBundles().front(), "cuda", 2, "");
  *reads_late = 0;
  const std::string wanted = TiedWeight(*bundle);
  std::string found(wanted.size(), ' ');
  bundle->memory.Receive(found.data(), bundle->tied_weight.get(), found.size());
  CHECK((found == wanted && !wanted.empty()));
}

TEST_CASE("work waiting on a GPU's stream sees the host's data from when it was requested, by calls and by graphs") {
  for (const std::string& path : DeviceBundles()) {
    const Logits wanted = Run(skd::LoadBundle(path, "cuda", 2, "", false, skd::Device::kCpu)).logits();
    const GpuEngines engines;
    for (const bool graphs : {false, true}) {
      INFO(path << (graphs ? " by graphs" : " by calls"));
      const Run found(skd::LoadBundle(path, "cuda", 2, "", graphs));
      CHECK((found.logits() == wanted));
      CHECK((found.graph_launches() > 0) == graphs);
    }
  }
}

TEST_CASE("a prompt that a GPU has no room for leaves the number of rows unchanged") {
  const std::string absolute = DeviceBundles().back();  // rows with longer prompts are placed before others, and move them
  skd::UseOnnxRuntime("", 2);
  const GpuEngines engines;
  const auto bundle = skd::LoadBundle(absolute, "cuda", 2, "");
  skd::Decoder decoder(bundle, bundle->manifest.schedule, 3, 8, 16);
  int moved = 0;
  const auto add = [&](const Tokens& prompt) {
    moved = 0;
    decoder.Add(prompt.data(), static_cast<int64_t>(prompt.size()), [&moved](int64_t, int64_t) { ++moved; });
  };
  add(kPrompts[3]);
  add(kPrompts[1]);
  int* const copies_left = Driver<int>("standin_copies_left");
  int failed = 0;
  for (bool added = false; !added; ++failed) {
    *copies_left = failed;
    try {
      add(kPrompts[0]);
      added = true;
    } catch (const skd::Error& error) {
      CHECK(error.code() == (moved == 0 ? SKD_ERROR_CAPACITY : SKD_ERROR_TARGET));  // moved rows cannot be moved back
    }
    REQUIRE(decoder.rows() == (added ? 3 : 2));
  }
  *copies_left = -1;
  CHECK(failed > 2 * 2 * 4);  // two rows move, with each layer's keys and values
}

TEST_CASE("the reason why an engine stopped on a prompt is given even if rows cannot be moved back") {
  skd::UseOnnxRuntime("", 2);
  GpuEngines engines;
  const auto bundle = skd::LoadBundle(DeviceBundles().back(), "cuda", 2, "", /*cuda_graphs=*/false);
  int* const copies_left = Driver<int>("standin_copies_left");
  int lost = 0;
  for (int copies = 0, moved = 0; moved < 4; ++copies) {  // two rows move to make room, and back
    engines.FailRunsAfter(0, "");
    skd::Decoder decoder(bundle, bundle->manifest.schedule, 3, 8, 16);
    const auto add = [&](const Tokens& prompt) {
      moved = 0;
      decoder.Add(prompt.data(), static_cast<int64_t>(prompt.size()), [&moved](int64_t, int64_t) { ++moved; });
    };
    add(kPrompts[3]);
    add(kPrompts[1]);
    engines.FailRunsAfter(0, "CUDA failure 700: an illegal memory access was encountered");
    *copies_left = copies;
    try {
      add(kPrompts[0]);
      FAIL("the engine did not stop");
    } catch (const skd::Error& error) {
      lost += moved == 2 ? 1 : 0;
      if (moved >= 2) CHECK_THAT(error.what(), Catch::Contains("CUDA failure 700"));
    }
    *copies_left = -1;
    REQUIRE(decoder.rows() == 2);
  }
  CHECK(lost > 0);
}
