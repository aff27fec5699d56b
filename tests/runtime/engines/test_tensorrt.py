"""TensorRT's engines, whose library is a stand-in that runs the graphs that the plans were built from."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import skipdecode
from skipdecode import bindings, targets
from skipdecode.bundle_facts import kv_bytes
from skipdecode.decoder import Decoder
from skipdecode.device import HostDevice
from skipdecode.engines import tensorrt
from skipdecode.engines.kernel_cache import KernelCache
from skipdecode.errors import BundleError, CapacityError, TargetError
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.generate import Generator
from skipdecode.kv_buffer import MIN_SLOTS
from skipdecode.memory import DeviceMemory
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import ScheduleRequest
from skipdecode.validation.plans import measure_plans
from tests.agreement import (
    assert_gives_the_references_logits,
    assert_mostly_gives_the_references_logits,
    on_levels,
)
from tests.models import LAYERS, LEAST_LAYERS, MAX_LENGTH
from tests.runtime import device
from tests.standin import package
from tests.standin import tensorrt as standin
from tests.zoo import Zoo

pytestmark = pytest.mark.usefixtures("built_here")
HYBRIDS = ("qwen3_5_text", "mamba2", "falcon_h1", "nemotron_h_dense", "nemotron_h_without_mamba")
PROMPTS = [[9, 8, 7, 6, 5, 4, 3], [5, 6]]
NEW = 14
Bundles = Callable[[Anchor], Path]


@pytest.mark.parametrize("anchor", Anchor, ids=str)
def test_plans_agree_with_the_reference_row_by_row_and_in_chunks(
    anchor: Anchor, gpu_bundle: Bundles, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = device.load(gpu_bundle(anchor), "tensorrt-rtx", None, monkeypatch)
    made, model = generator.manifest, zoo.model("qwen2").half().float()
    lengths = [len(prompt) for prompt in PROMPTS]
    decoder = Decoder(generator.engines, made.model, made.schedule, lengths, NEW, prefill_chunk=3)
    assert_gives_the_references_logits(decoder, model, PROMPTS, NEW, 0.02)


def test_prompts_pass_through_buffers_of_the_plans_size_in_layers_that_no_step_computes(
    gpu_bundle: Bundles, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = device.load(gpu_bundle(Anchor.GENERATED), "tensorrt-rtx", None, monkeypatch)
    made, lengths = generator.manifest, [len(prompt) for prompt in PROMPTS]
    least = dataclasses.replace(made.schedule, layers=made.schedule.layers[-1:])
    decoder = Decoder(generator.engines, made.model, least, lengths, NEW, prefill_chunk=3)
    assert 0 in decoder.slots
    assert_gives_the_references_logits(decoder, zoo.model("qwen2").half().float(), PROMPTS, NEW, 0.02)


@pytest.mark.parametrize(
    ("name", "anchor"),
    [
        *((name, Anchor.GENERATED) for name in ("gemma2", "granite_swa", "lfm2", "reading_others")),
        *((name, Anchor.ABSOLUTE) for name in HYBRIDS),
        ("reading_others", Anchor.ABSOLUTE),  # upper layers read keys that have more slots than those layers would need
    ],
)
def test_caps_sinks_states_and_keys_of_two_sizes_or_other_layers_agree_with_torch_and_onnx_runtime(
    name: str, anchor: Anchor, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    least, longest = LEAST_LAYERS.get(name, 2), 2 * MIN_SLOTS if name == "reading_others" else MAX_LENGTH
    asked = ScheduleRequest(name="linear", max_layers=LAYERS, min_layers=least, span=12, max_variants=3, anchor=anchor)
    export(
        ExportRequest(
            model=str(zoo.checkpoint(name)), out=tmp_path / "bundle", schedule=asked, dtype="fp16", max_batch=4,
            max_length=longest, targets=("tensorrt-rtx:sm89",),
        )
    )  # fmt: skip
    generator = device.load(tmp_path / "bundle", "tensorrt-rtx", None, monkeypatch)
    made, lengths = generator.manifest, [len(prompt) for prompt in PROMPTS]
    decoder = Decoder(generator.engines, made.model, made.schedule, lengths, NEW, prefill_chunk=3)
    assert_gives_the_references_logits(decoder, zoo.model(name).half().float(), PROMPTS, NEW, 0.02)
    rows = measure_plans(generator)
    assert rows and all(row["holds"] for row in rows)


@pytest.mark.parametrize(("name", "quantize"), [("llama", "int8"), ("opt", "int4"), ("qwen3_5_text", "int4")])
def test_quantised_plans_agree_with_a_reference_whose_weights_lie_on_the_same_levels(
    name: str, quantize: str, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = _plans(zoo, name, tmp_path, monkeypatch, quantize=quantize)
    assert (generator.target.weights, generator.target.tied_weight) == (quantize, None)
    decoder = Decoder(generator.engines, generator.manifest.model, generator.manifest.schedule, [7, 2], NEW, prefill_chunk=3)
    assert_gives_the_references_logits(decoder, on_levels(zoo.model(name), quantize), PROMPTS, NEW, 0.02)
    assert measure_plans(generator) is None, "the standard graphs have other weights"


# a softmax router, a sigmoid router with groups of experts and shared ones, biases and clamps, squared ReLUs of another width,
# transposed matrices, GELUs
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "nemotron_h_latent", "llama4_text", "gemma4_moe"])
def test_mixtures_agree_with_torch_and_every_plan_with_onnx_runtime(
    name: str, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = _plans(zoo, name, tmp_path, monkeypatch)
    made = generator.manifest
    decoder = Decoder(generator.engines, made.model, made.schedule, [7, 2], NEW, prefill_chunk=3)
    assert_mostly_gives_the_references_logits(decoder, zoo.model(name).half().float(), PROMPTS, NEW, 0.01)
    rows = measure_plans(generator)
    assert rows and all(row["holds"] for row in rows)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_mixtures_agree_with_a_reference_whose_weights_lie_on_the_same_levels(
    quantize: str, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = _plans(zoo, "mixtral", tmp_path, monkeypatch, quantize=quantize)
    decoder = Decoder(generator.engines, generator.manifest.model, generator.manifest.schedule, [7, 2], NEW, prefill_chunk=3)
    model = on_levels(zoo.model("mixtral"), quantize)
    assert_mostly_gives_the_references_logits(decoder, model, PROMPTS, NEW, 0.01)


def _plans(zoo: Zoo, name: str, folder: Path, patch: pytest.MonkeyPatch, quantize: str = "none") -> Generator:
    asked = ScheduleRequest(name="linear", max_layers=LAYERS, min_layers=2, span=12, max_variants=3)
    export(
        ExportRequest(
            model=str(zoo.checkpoint(name)), out=folder / "bundle", schedule=asked, dtype="fp16", max_batch=4,
            max_length=MAX_LENGTH, quantize=quantize, targets=("tensorrt-rtx:sm89",),
        )
    )  # fmt: skip
    return device.load(folder / "bundle", "tensorrt-rtx", None, patch)


def test_linear_biases_keep_their_slopes_far_from_the_first_slot(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, fp16 would round a slope times the slot's own number to quarters."""
    full, prompt, new = ScheduleRequest(name="full"), [5 + index % 89 for index in range(1800)], 3
    export(
        ExportRequest(
            model=str(zoo.checkpoint("mpt")), out=tmp_path / "bundle", schedule=full, dtype="fp16", max_length=2048,
            targets=("tensorrt-rtx:sm89",),
        )
    )  # fmt: skip
    decoder = device.load(tmp_path / "bundle", "tensorrt-rtx", None, monkeypatch).decoder([len(prompt)], new)
    assert_gives_the_references_logits(decoder, zoo.model("mpt").half().float(), [prompt], new, 0.01)


def test_heads_turned_into_tokens_because_of_many_slots_agree_with_torch_and_onnx_runtime(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(
        ExportRequest(
            model=str(zoo.checkpoint("llama_long")), out=tmp_path / "bundle", schedule=ScheduleRequest(name="full"), dtype="fp16",
            max_batch=2, max_length=32768, targets=("tensorrt-rtx:sm89",),
        )
    )  # fmt: skip
    generator = device.load(tmp_path / "bundle", "tensorrt-rtx", None, monkeypatch)
    decoder = generator.decoder([len(prompt) for prompt in PROMPTS], NEW)
    assert_gives_the_references_logits(decoder, zoo.model("llama_long").half().float(), PROMPTS, NEW, 0.02)
    rows = measure_plans(generator)
    assert rows and all(row["holds"] for row in rows)


def test_a_decode_steps_shapes_are_set_once_although_a_prompt_of_one_token_shares_its_context(
    gpu_bundle: Bundles, turnaround_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[tuple[int, str]] = Counter()
    set_shape = standin.Context.set_input_shape

    def set_input_shape(self: standin.Context, name: str, shape: tuple[int, ...]) -> bool:
        counts[id(self), name] += self._profile == 0
        return set_shape(self, name, shape)

    monkeypatch.setattr(standin.Context, "set_input_shape", set_input_shape)
    run = device.turn_around(turnaround_library)
    generator = device.load(gpu_bundle(Anchor.GENERATED), "tensorrt-rtx", run, monkeypatch)
    first, second = (generator.generate([5], max_new_tokens=4, ignore_eos=True) for _ in range(2))
    assert first.sequences == second.sequences
    assert set(counts.values()) == {1}


def test_a_damaged_plan_is_reported_in_one_line(gpu_bundle: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device.stand_in(gpu_bundle(Anchor.GENERATED), monkeypatch)
    plan = tmp_path / "head.plan"
    plan.write_bytes(b"no plan")
    with pytest.raises(BundleError, match=r"head\.plan: cannot be loaded \(the plan is damaged\); export the model again"):
        tensorrt.TensorRTEngine(plan, tensorrt.PlanRuntime("tensorrt-rtx", HostDevice()))


def test_no_memory_for_a_plan_is_reported_as_such(gpu_bundle: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "[defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)"
    stands_in = device.stand_in(gpu_bundle(Anchor.GENERATED), monkeypatch)
    shared = tensorrt.PlanRuntime("tensorrt-rtx", HostDevice())
    shared.log.errors.append("what an earlier call left behind")
    plan = tmp_path / "head.plan"
    plan.write_bytes(b"a plan")

    def deserialize(data: object) -> None:
        for message in ("the plan is not loaded", said):
            shared.log.log(stands_in.ILogger.Severity.ERROR, message)

    monkeypatch.setattr(shared.runtime, "deserialize_cuda_engine", deserialize)
    with pytest.raises(CapacityError, match=r"head\.plan: no memory is left for it \(.*\(out of memory\)\); free some, or"):
        tensorrt.TensorRTEngine(plan, shared)
    shared.log.errors += ["a run failed", said]
    assert str(shared.run_error("start again")).startswith("no memory is left to run a plan ([defaultAllocator")


def _calls(kind: type) -> set[str]:
    return {name for name in dir(kind) if callable(getattr(kind, name)) and not name.startswith("_")}


def test_the_stand_in_has_only_calls_that_the_library_has() -> None:
    import tensorrt_rtx as trt

    pairs = {
        standin.RtxEngine: trt.ICudaEngine, standin.RtxContext: trt.IExecutionContext, standin.Kernels: trt.IRuntimeCache,
    }  # fmt: skip
    for stands_in, real in pairs.items():
        assert _calls(stands_in) and _calls(stands_in) <= {*dir(real)}
    config = standin.RtxEngine.create_runtime_config(object.__new__(standin.RtxEngine))
    assert vars(config).keys() <= {*dir(trt.IRuntimeConfig)}


@pytest.mark.parametrize("version", package.VERSIONS)
def test_the_stand_in_has_only_calls_that_the_package_tensorrts_bindings_have(version: str) -> None:
    real = package.names(version)["names"]
    assert _calls(standin.Engine) <= {*real["ICudaEngine"]}
    assert _calls(standin.Context) <= {*real["IExecutionContext"]}
    assert vars(standin.Engine.create_runtime_config(object.__new__(standin.Engine))).keys() <= {*real["IRuntimeConfig"]}


def test_plans_of_the_package_tensorrt_agree_with_torch_and_onnx_runtime(
    tensorrt_bundle: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = device.load(tensorrt_bundle, "tensorrt", None, monkeypatch)
    made, lengths = generator.manifest, [len(prompt) for prompt in PROMPTS]
    decoder = Decoder(generator.engines, made.model, made.schedule, lengths, NEW, prefill_chunk=3)
    assert_gives_the_references_logits(decoder, zoo.model("qwen2").half().float(), PROMPTS, NEW, 0.02)
    rows = measure_plans(generator)
    assert rows and all(row["holds"] for row in rows)


@pytest.mark.parametrize("target", ["cuda", "tensorrt-rtx"])
def test_a_row_takes_the_bytes_that_inspect_reports(target: str, gpu_bundle: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = device.load(gpu_bundle(Anchor.GENERATED), target, None, monkeypatch)
    made = generator.manifest
    shallow = dataclasses.replace(made.schedule, layers=made.schedule.layers[-1:])  # no decode step computes most of the layers
    for schedule in (made.schedule, shallow):
        decoder = generator.decoder([MAX_LENGTH // 2], MAX_LENGTH - MAX_LENGTH // 2, schedule)
        taken = sum(array.nbytes for layer in decoder.kv.layers for array in layer.values())
        assert taken == kv_bytes(made, schedule, generator.target) > 0


def test_kernels_are_released_after_every_context_that_uses_them(
    gpu_bundle: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # collects what earlier tests have left
    gone: list[str] = []
    for kind in (standin.RtxContext, standin.RtxEngine, standin.Kernels):
        monkeypatch.setattr(kind, "__del__", lambda self: gone.append(type(self).__name__), raising=False)
    bundle = gpu_bundle(Anchor.GENERATED)
    device.stand_in(bundle, monkeypatch)
    made = skipdecode.manifest.read(bundle)

    def run() -> None:
        shared = tensorrt.PlanRuntime("tensorrt-rtx", HostDevice(), KernelCache(tmp_path / "kernels.bin"))
        engines = targets.plan_engines(
            made, bundle, made.targets[1], shared.device, None, lambda path: tensorrt.TensorRTEngine(path, shared)
        )
        decoder = Decoder(engines, made.model, made.schedule, [2], NEW)
        decoder.prefill([[5, 6]])
        decoder.decode_step([3])

    run()
    gc.collect()
    assert gone[-1] == "Kernels" and gone.count("RtxContext") > gone.count("RtxEngine") > 0
    assert [each for each in gone if each != "Kernels"][-1] == "RtxEngine"


def test_a_gpu_that_the_library_does_not_support_is_reported_in_one_line(
    gpu_bundle: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what TensorRT-RTX 1.7.1 says of any plan on an H200."""
    said = "Error Code 6: API Usage Error (.. capability 9.0. .. TensorRT-RTX does not support this compute capability, so ..)"
    monkeypatch.setattr(standin, "DAMAGED", said)
    device.stand_in(gpu_bundle(Anchor.GENERATED), monkeypatch)
    plan = tmp_path / "head.plan"
    plan.write_bytes(b"a plan")
    with pytest.raises(
        TargetError, match=r"^tensorrt_rtx does not support this GPU \(Error .* capability, .*\); export with --target cuda$"
    ):
        tensorrt.TensorRTEngine(plan, tensorrt.PlanRuntime("tensorrt-rtx", HostDevice()))


def test_a_plan_made_by_another_version_is_reported_in_one_line(gpu_bundle: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = gpu_bundle(Anchor.GENERATED)
    stands_in = device.stand_in(bundle, monkeypatch)
    shared = tensorrt.PlanRuntime("tensorrt-rtx", HostDevice())
    memory, head = DeviceMemory(shared.device, "float16"), bundle / "targets" / "tensorrt-rtx" / "head.plan"
    engine = tensorrt.TensorRTEngine(head, shared)
    wide = {bindings.HIDDEN: memory.floats((5, 1, 64)), bindings.LAST: memory.twin(np.zeros(5, np.int64))[0]}
    wide[bindings.TIED_WEIGHT] = memory.floats((104, 64))
    with pytest.raises(
        BundleError, match=r"head\.plan: has no optimisation profile for .*\(5, 1, 64\).*; export the model again"
    ):
        engine.bind(wide, {bindings.LOGITS: memory.floats((5, 99))})
    monkeypatch.setattr(standin.Engine, "get_tensor_dtype", lambda self, name: stands_in.DataType.HALF)
    with pytest.raises(BundleError, match=r"head\.plan: gives logits in a dtype other than fp32; export the model again"):
        tensorrt.TensorRTEngine(head, shared)


def test_a_schedule_that_needs_more_slots_than_the_plans_have_is_refused(
    gpu_bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = device.load(gpu_bundle(Anchor.ABSOLUTE), "tensorrt-rtx", None, monkeypatch)
    generator.engines = dataclasses.replace(generator.engines, slots=(12,) * LAYERS)
    with pytest.raises(
        CapacityError, match=r"buffers have 12 slots, but this run needs 21; .* export the model with the schedule of this run"
    ):
        generator.generate(PROMPTS, max_new_tokens=NEW, schedule="full")


def test_compiled_kernels_are_shared_by_all_engines_and_kept_for_the_next_start(
    gpu_bundle: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, file = gpu_bundle(Anchor.GENERATED), tmp_path / "cache" / "kernels.bin"
    device.stand_in(bundle, monkeypatch)
    made = skipdecode.manifest.read(bundle)
    target = made.targets[1]

    def run(path: Path) -> None:
        shared = tensorrt.PlanRuntime(target.name, HostDevice(), KernelCache(path))
        engines = targets.plan_engines(
            made, bundle, target, shared.device, None, lambda path: tensorrt.TensorRTEngine(path, shared)
        )
        Decoder(engines, made.model, made.schedule, [2], NEW).prefill([[5, 6]])

    run(file)
    written = file.read_bytes()
    assert len(written.split()) == 2 + len(made.segments) + 2, "segments, embedding and head"
    before = file.stat().st_ino
    run(file)
    assert file.stat().st_ino == before, "nothing new is written"
    file.write_bytes(b"of another GPU")
    run(file)
    assert file.read_bytes() == written
    assert [path.name for path in file.parent.iterdir()] == ["kernels.bin"]
    (tmp_path / "file").write_bytes(b"")
    run(tmp_path / "file" / "kernels.bin")  # without a folder there is no cache and no error
