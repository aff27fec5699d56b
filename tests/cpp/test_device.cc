// Engines for a GPU, tested on a CPU through the classes below the public header.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "bundle.h"
#include "catch.h"
#include "decoder.h"
#include "device_bundles.h"
#include "error.h"

namespace {

// The same rows on both targets, whose logits must stay close: fp16 engines against fp32 ones.
class TargetPair {
 public:
  explicit TargetPair(const std::string& path)
      : fp32_(skd::LoadBundle(path, "cpu", 2, "")), fp16_(skd::LoadBundle(path, "cuda", 2, "", true, skd::Device::kCpu)) {
    for (const auto& bundle : {fp32_, fp16_}) decoders_.emplace_back(bundle, bundle->manifest.schedule, 3, 8, 12);
  }
  void Add(const Tokens& prompt) {
    for (skd::Decoder& decoder : decoders_) decoder.Add(prompt.data(), static_cast<int64_t>(prompt.size()), kIgnore);
    Compare();
  }
  void Remove(int64_t row) {
    for (skd::Decoder& decoder : decoders_) decoder.Remove(row, kIgnore);
    Compare();
  }
  void Step() {
    const Tokens tokens(static_cast<size_t>(decoders_[0].rows()), 7);
    REQUIRE(decoders_[0].Step(tokens.data()) == decoders_[1].Step(tokens.data()));
    Compare();
  }

 private:
  static constexpr auto kIgnore = [](int64_t, int64_t) {};

  void Compare() {
    const int64_t vocab_size = fp32_->manifest.model.vocab_size;
    for (int64_t row = 0; row < decoders_[0].rows(); ++row) {
      const float *wanted = decoders_[0].Logits(row), *found = decoders_[1].Logits(row);
      float largest = 0, error = 0;
      for (int64_t i = 0; i < vocab_size; ++i) {
        largest = std::max(largest, std::abs(wanted[i]));
        error = std::max(error, std::abs(wanted[i] - found[i]));
      }
      INFO("row " << row << ": " << error << " of " << largest);
      CHECK(error > 0);
      CHECK(error <= 0.02F * largest);
    }
  }

  std::shared_ptr<const skd::Bundle> fp32_, fp16_;
  std::vector<skd::Decoder> decoders_;
};

}  // namespace

TEST_CASE("engines for a GPU give the same as the CPU's, whatever rows join and leave") {
  for (const std::string& path : DeviceBundles()) {
    TargetPair pair(path);
    pair.Add(kPrompts[0]);
    pair.Step();
    pair.Add(kPrompts[1]);
    for (int step = 0; step < 3; ++step) pair.Step();
    pair.Add(kPrompts[2]);
    pair.Step();
    pair.Remove(0);
    pair.Step();
    pair.Add(kPrompts[3]);
    for (int step = 0; step < 4; ++step) pair.Step();
  }
}

TEST_CASE("an ONNX Runtime without CUDA is refused with what to do") {
  try {
    skd::LoadBundle(DeviceBundles().front(), "cuda", 2, "");
    FAIL("it was loaded");
  } catch (const skd::Error& error) {
    CHECK(error.code() == SKD_ERROR_TARGET);
    CHECK(std::string(error.what()).find("is built without CUDA") != std::string::npos);
    CHECK(std::string(error.what()).find("onnxruntime-gpu") != std::string::npos);
  }
}
