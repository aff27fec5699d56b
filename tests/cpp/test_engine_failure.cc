// Which errors ONNX Runtime's failures become.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bundle.h"
#include "catch.h"
#include "device_bundles.h"
#include "engine_failure.h"
#include "gpu_engines.h"
#include "session.h"

namespace {

using Tokens = std::vector<int64_t>;

constexpr char kNoMemory[] =
    "Non-zero status code returned while running MatMul node. Name:'up' Status Message: bfc_arena.cc:376 Failed to allocate "
    "memory for requested buffer of size 7340033";

skd_row_options Options() {
  skd_row_options options = skd_row_options_default();
  options.max_new_tokens = 5;
  options.ignore_eos = 1;
  return options;
}

std::unique_ptr<skd::Session> SessionOfTwoRows(const std::shared_ptr<const skd::Bundle>& bundle) {
  skd_session_options room = skd_session_options_default();
  room.max_rows = 2;
  return std::make_unique<skd::Session>(bundle, room);
}

Tokens RemainingTokens(skd::Session* session) {
  Tokens tokens;
  for (auto events = session->Step(); !events.empty(); events = session->Step()) {
    for (const skd_event& event : events) tokens.push_back(event.token);
  }
  return tokens;
}

void CheckError(const skd::Error& error, skd_code code, const std::string& line) {
  CHECK(error.code() == code);
  CHECK(std::string(error.what()) == line);
}

void CheckThrows(const std::function<void()>& call, skd_code code, const std::string& line) {
  try {
    call();
    FAIL("it went through");
  } catch (const skd::Error& error) {
    CheckError(error, code, line);
  }
}

}  // namespace

TEST_CASE("an error says why an engine does not load, whose fault it is and what to do") {
  const std::string less = "free some, or export with --quantize int4";
  CheckError(skd::LoadFailure("std::bad_alloc", "head.onnx"), SKD_ERROR_CAPACITY, "head.onnx: no memory is left; " + less);
  CheckError(skd::LoadFailure("CUDA failure 2: out of memory ; GPU=0", "head.onnx"), SKD_ERROR_CAPACITY,
             "head.onnx: no memory is left; " + less);
  CheckError(skd::LoadFailure("CUBLAS_STATUS_ALLOC_FAILED", "head.onnx"), SKD_ERROR_CAPACITY,
             "head.onnx: no memory is left; " + less);
  const std::string check = "check nvidia-smi, and that cuBLAS and cuDNN of onnxruntime-gpu's CUDA are installed";
  CheckError(skd::LoadFailure("This session contains graph nodes that are assigned to the default CPU EP, but fallback to CPU EP "
                              "has been explicitly disabled by the user.",
                              "head.onnx"),
             SKD_ERROR_TARGET,
             "head.onnx: this ONNX Runtime cannot run all of it with CUDA (it would leave nodes to the CPU); name a newer one in "
             "skd_load_options.onnxruntime_library, or export the model for cpu");
  CheckError(skd::LoadFailure("CUDA failure 100: no CUDA-capable device is detected\nGPU=-1", "head.onnx"), SKD_ERROR_TARGET,
             "head.onnx: ONNX Runtime cannot run it with CUDA (CUDA failure 100: no CUDA-capable device is detected); " + check);
  CheckError(
      skd::LoadFailure("session_env.EnvCreatedWithGlobalThreadPools() was false. When the session is not configured to use "
                       "per session threadpools, the env must be created with the the CreateEnvWithGlobalThreadPools API.",
                       "head.onnx"),
      SKD_ERROR_TARGET,
      "this process made an ONNX Runtime environment of its own first, so engines cannot share one thread pool; load the "
      "bundle first, or create that environment with global thread pools");
  CheckError(skd::LoadFailure("Protobuf parsing failed.", "head.onnx"), SKD_ERROR_BUNDLE,
             "head.onnx: cannot be loaded (Protobuf parsing failed.); export the model again");
  CheckError(skd::LoadFailure("", "head.onnx"), SKD_ERROR_BUNDLE,
             "head.onnx: cannot be loaded (no reason given); export the model again");
}

TEST_CASE("an engine that does not fit in memory is not reported as a damaged bundle") {
  skd::UseOnnxRuntime("", 2);
  GpuEngines engines;
  engines.FailLoading(kNoMemory);
  try {
    skd::LoadBundle(DeviceBundles().front(), "cuda", 2, "");
    FAIL("it was loaded");
  } catch (const skd::Error& error) {
    CHECK(error.code() == SKD_ERROR_CAPACITY);
    CHECK_THAT(error.what(), Catch::EndsWith(".onnx: no memory is left for 8 MiB; free some, or export with --quantize int4"));
  }
}

TEST_CASE("a prompt that does not fit in memory is refused, and the session goes on as before") {
  skd::UseOnnxRuntime("", 2);
  GpuEngines engines;
  const auto bundle = skd::LoadBundle(DeviceBundles().back(), "cuda", 2, "");
  const Tokens shorter = {90}, longer = {9, 8, 7, 6, 5, 4, 3};  // which is placed before the other row, and moves it
  const auto session = SessionOfTwoRows(bundle);
  session->Add(shorter.data(), shorter.size(), Options());
  const Tokens wanted = RemainingTokens(session.get());
  session->Add(shorter.data(), shorter.size(), Options());
  for (int runs = 0; runs < 4; ++runs) {
    engines.FailRunsAfter(runs, kNoMemory);
    CheckThrows([&] { session->Add(longer.data(), longer.size(), Options()); }, SKD_ERROR_CAPACITY,
                "no memory is left for 8 MiB; send fewer rows or shorter prompts");
  }
  engines.FailRunsAfter(0, "");
  CHECK(RemainingTokens(session.get()) == wanted);
}

TEST_CASE("where ONNX Runtime has no memory for bindings, a prompt or a step is refused, and the session goes on as before") {
  skd::UseOnnxRuntime("", 2);
  GpuEngines engines;
  const auto bundle = skd::LoadBundle(DeviceBundles().front(), "cuda", 2, "");
  const Tokens prompt = {5, 6};
  const auto undisturbed = SessionOfTwoRows(bundle);
  undisturbed->Add(prompt.data(), prompt.size(), Options());
  const Tokens wanted = RemainingTokens(undisturbed.get());
  const auto session = SessionOfTwoRows(bundle);
  const std::string no_memory = "no memory is left; send fewer rows or shorter prompts";
  for (int tensors = 0; tensors < 6; ++tensors) {
    engines.FailBindingAfter(tensors, "std::bad_alloc");
    CheckThrows([&] { session->Add(prompt.data(), prompt.size(), Options()); }, SKD_ERROR_CAPACITY, no_memory);
  }
  engines.FailBindingAfter(0, "");
  session->Add(prompt.data(), prompt.size(), Options());
  Tokens tokens = {session->Step().front().token};
  for (int tensors = 0; tensors < 6; ++tensors) {
    engines.FailBindingAfter(tensors, "std::bad_alloc");
    CheckThrows([&] { session->Step(); }, SKD_ERROR_CAPACITY, no_memory);
  }
  engines.FailBindingAfter(0, "");
  for (const int64_t token : RemainingTokens(session.get())) tokens.push_back(token);
  CHECK(tokens == wanted);
}

TEST_CASE("a step that fails halfway is never taken for one that has not begun") {
  skd::UseOnnxRuntime("", 2);
  GpuEngines engines;
  const auto bundle = skd::LoadBundle(DeviceBundles().front(), "cuda", 2, "", /*cuda_graphs=*/false);
  const Tokens prompt = {5, 6};
  const auto session = SessionOfTwoRows(bundle);
  session->Add(prompt.data(), prompt.size(), Options());
  session->Step();
  engines.FailRunsAfter(1, kNoMemory);
  CheckThrows(
      [&] { session->Step(); }, SKD_ERROR_TARGET,
      "a decode step failed halfway (no memory is left for 8 MiB; send fewer rows or shorter prompts); destroy the session "
      "and create another");
  engines.FailRunsAfter(1, "CUDA failure 700: an illegal memory access was encountered");
  CheckThrows([&] { session->Step(); }, SKD_ERROR_TARGET,
              DeviceBundles().front() + "/targets/cuda/segment_000.onnx" +
                  ": ONNX Runtime stopped (CUDA failure 700: an illegal memory access was encountered); check nvidia-smi, and "
                  "start again");
}

TEST_CASE("an engine that fails on a CPU does not blame a GPU") {
  CheckError(skd::RunFailure("seqlens_k[0] = 6 is out of range", /*on_gpu=*/false, "head.onnx"), SKD_ERROR_INTERNAL,
             "head.onnx: ONNX Runtime stopped (seqlens_k[0] = 6 is out of range); check the bundle with skip-inspect "
             "--check-hashes");
  CHECK(skd::RunFailure(kNoMemory, /*on_gpu=*/false, "head.onnx").code() == SKD_ERROR_CAPACITY);
}

TEST_CASE("a reason that comes after a node's long name is reported") {
  const std::string begins = "Non-zero status code returned while running MatMul node. Name:'";
  const std::string ends = "' Status Message: matmul_helper.h:59 left operand cannot broadcast on dim 0";
  const std::string reason = skd::Reason(begins + std::string(1000, 'n') + ends + "\nand more");
  CHECK(reason.size() == 400);
  CHECK_THAT(reason, Catch::StartsWith(begins) && Catch::EndsWith(ends) && Catch::Contains("nn...nn"));
  const std::string fits(400, 'n');
  CHECK(skd::Reason(fits) == fits);
}

TEST_CASE("a long reason is cut between characters") {
  std::string characters;
  for (int i = 0; i < 200; ++i) characters += "\xE2\x82\xAC";  // a euro sign, 3 bytes
  for (const std::string before : {"", "1", "12"}) {
    for (const std::string after : {"", "1", "12"}) {
      const std::string reason = skd::Reason(before + characters + after);
      CHECK(reason == skd::OneLine(reason));  // valid UTF-8
      CHECK(reason.size() <= 400);
      CHECK(reason.size() >= 400 - 2 - 2);
    }
  }
}
