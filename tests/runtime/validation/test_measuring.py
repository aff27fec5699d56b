"""Latency, workload, bytes and parity on real engines."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from skipdecode.device import Call, HostDevice
from skipdecode.device_loop import DeviceLoop
from skipdecode.errors import CapacityError
from skipdecode.generate import Generator
from skipdecode.kv_buffer import key_shapes, state_shapes
from skipdecode.schedule import Anchor
from skipdecode.validation import parity, workload
from skipdecode.validation.latency import max_context, measure_cell
from skipdecode.validation.machine import copy_gb_per_s
from skipdecode.validation.parity import measure_parity
from skipdecode.validation.step_bytes import StepBytes
from skipdecode.validation.workload import Request, check_fits, measure_workload, read_requests
from tests.models import CONFIGS, LAYERS, MAX_LENGTH
from tests.runtime import device
from tests.runtime.validation.conftest import answer_here
from tests.zoo import Zoo


def _step_bytes(generator: Generator) -> StepBytes:
    return StepBytes(manifest=generator.manifest, target=generator.target)


def test_a_step_reads_the_weights_of_its_layers_the_head_and_every_valid_position(zoo: Zoo) -> None:
    generator = skipdecode.load(zoo.bundle("llama"))
    model, target = generator.manifest.model, generator.target
    step_bytes = _step_bytes(generator)
    weights = sum(target.segment_weight_bytes) + target.head_weight_bytes
    kv = LAYERS * 2 * model.num_kv_heads * model.head_size * 4
    assert step_bytes.of(LAYERS, batch=3, context=10) == weights + 3 * 10 * kv
    layer = sum(parameter.nbytes for parameter in zoo.model("llama").model.layers[0].parameters())
    assert step_bytes.of(LAYERS, 1, 0) - step_bytes.of(2, 1, 0) == pytest.approx((LAYERS - 2) * layer, rel=0.02)


def test_a_cell_has_every_variant_most_layers_first(zoo: Zoo) -> None:
    generator = skipdecode.load(zoo.bundle("opt"))
    cell = measure_cell(generator, _step_bytes(generator), batch=2, context=20, gb_per_s=10.0)
    layers = [row["layers"] for row in cell["variants"]]
    assert layers == sorted((v.num_layers for v in generator.manifest.variants), reverse=True)
    assert cell["variants"][0]["gain"]["median"] == cell["variants"][0]["promised_gain"] == 1
    promised = [row["promised_gain"] for row in cell["variants"]]
    assert promised == sorted(promised)
    assert all(row["ms"]["median"] > 0 for row in cell["variants"])


@pytest.mark.parametrize("target", ["cuda", "tensorrt-rtx"])
@pytest.mark.parametrize("anchor", Anchor, ids=str)
def test_on_a_device_a_variants_steps_follow_each_other_as_in_a_run(
    target: str, anchor: Anchor, gpu_bundle: Callable[[Anchor], Path], turnaround_library: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    generator = device.load(gpu_bundle(anchor), target, device.turn_around(turnaround_library), monkeypatch)
    step_bytes, asked = _step_bytes(generator), []
    monkeypatch.setattr(
        DeviceLoop, "step", lambda loop, step=DeviceLoop.step: asked.append(loop.decoder.kv.lengths[0]) or step(loop)
    )
    context = max_context(generator)
    cell = measure_cell(generator, step_bytes, batch=2, context=context, gb_per_s=10.0)
    steps = max(asked) - context + 1
    assert asked == list(range(context, context + steps)) * (len(asked) // steps), "on top of the context each time"
    assert steps == 16 and context + steps <= MAX_LENGTH
    full = cell["variants"][0]
    assert full["read_bytes"] == step_bytes.of(LAYERS, 2, context + steps // 2)
    assert all(row["ms"]["median"] > 0 for row in cell["variants"])


def test_a_devices_bandwidth_counts_what_its_copies_read_and_write() -> None:
    class Counting(HostDevice):
        copied = 0

        def copy(self, target: int, source: int, nbytes: int) -> None:
            self.copied += nbytes
            super().copy(target, source, nbytes)

    counting = Counting()
    assert 0.01 < copy_gb_per_s(counting, mib=1) < 1000
    assert counting.copied == 50 << 20


def test_a_workload_reports_every_position_with_its_layers(zoo: Zoo) -> None:
    generator = skipdecode.load(zoo.bundle("opt"))
    load = measure_workload(generator, _step_bytes(generator), [Request(prompt_tokens=5, new_tokens=9)] * 2, batch=2)
    schedule = generator.manifest.schedule
    assert [row["layers"] for row in load["positions"]] == [schedule.layers_at(t) for t in range(8)]
    assert all(row["promised_ms"] <= row["full_ms"] for row in load["positions"])
    assert load["own"]["token_ms"]["n"] % 8 == 0


def test_on_a_device_no_step_is_captured_during_a_measured_run(
    gpu_bundle: Callable[[Anchor], Path], turnaround_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[int] = []

    class Counting(HostDevice):
        def capture(self, calls: Call) -> Call:
            captures[-1] += 1
            return calls

    monkeypatch.setattr(device, "HostDevice", Counting)
    generator = device.load(gpu_bundle(Anchor.GENERATED), "cuda", device.turn_around(turnaround_library), monkeypatch)
    run = workload._run

    def counted(*given: Any) -> Any:
        captures.append(0)
        return run(*given)

    monkeypatch.setattr(workload, "_run", counted)
    measure_workload(generator, _step_bytes(generator), [Request(prompt_tokens=5, new_tokens=9)], batch=1)
    assert sum(captures) > 0 and len(captures) % 3 == 0
    assert sum(captures[2::3]) == 0, "two runs precede each that is measured"


def test_one_new_token_is_a_workload_without_decode_steps(zoo: Zoo) -> None:
    generator = skipdecode.load(zoo.bundle("opt"))
    load = measure_workload(generator, _step_bytes(generator), [Request(prompt_tokens=5, new_tokens=1)], batch=1)
    assert (load["decode_gain"], load["own"]["token_ms"], load["positions"]) == (None, None, [])


def test_real_lengths_run_in_order_in_batches(zoo: Zoo, tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(
        '{"prompt_tokens": 5, "new_tokens": 3}\n{"prompt_tokens": 9, "new_tokens": 6}\n'
        '{"prompt_tokens": 2, "new_tokens": 2}\n{"prompt_tokens": 3, "new_tokens": 2}\n'
    )
    generator = skipdecode.load(zoo.bundle("opt"))
    requests = read_requests(path)
    load = measure_workload(generator, _step_bytes(generator), requests, batch=2)
    assert load["own"]["token_ms"]["n"] % (5 + 1) == 0  # the first two run together until the longer one ends
    assert load["requests"] == 4
    with pytest.raises(CapacityError, match="exceed the bundle's 48"):
        check_fits([*requests, Request(prompt_tokens=40, new_tokens=9)], 1, generator, "--workload")
    apart = [Request(prompt_tokens=40, new_tokens=3), Request(prompt_tokens=3, new_tokens=40)]
    check_fits(apart, 1, generator, "--workload")
    with pytest.raises(
        CapacityError,
        match="40 prompt tokens and 40 new ones, of 2 requests that run together, exceed the bundle's 48; ask for fewer, "
        "choose a smaller --batch, or export with a larger --max-length",
    ):
        check_fits(apart, 2, generator, "--workload")


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"prompt_tokens": 0, "new_tokens": 3}', '{"prompt_tokens": 5, "new_tokens": "3"}']
)
def test_a_malformed_length_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"prompt_tokens": 5, "new_tokens": 3}\n' + line)
    with pytest.raises(CapacityError, match=r"lengths\.jsonl, line 2: "):
        read_requests(path)


# minicpm3 keeps expanded what torch caches as a latent; qwen3_5_text has states in place of keys and values, falcon_h1 alongside
# them, nemotron_h layers that keep nothing; lfm3 has states in one layer and all keys where torch caches a window of them in
# another; mamba has only states, which torch keeps transposed; recurrent_gemma's torch keeps in its modules
@pytest.mark.parametrize(
    "name", [*CONFIGS, "minicpm3", "qwen3_5_text", "falcon_h1", "nemotron_h", "lfm3", "mamba", "recurrent_gemma"]
)
def test_every_variant_agrees_with_the_reference_down_to_the_kv_buffer(
    name: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = skipdecode.load(zoo.bundle(name))
    monkeypatch.setattr(parity, "_run_reference", answer_here)
    rows = measure_parity(generator, str(zoo.checkpoint(name)))
    long = f"v{LAYERS}, {MAX_LENGTH - parity.LONG_NEW_TOKENS} tokens"
    assert [row["name"] for row in rows] == [*(variant.name for variant in generator.manifest.variants), long]
    for row in rows:
        assert row["holds"] and row["first_token_that_differs"] is None, row
        assert len(row["kv"]) == int(row["name"].partition(",")[0].removeprefix("v"))
        for found in row["kv"]:
            errors = [error for key, error in found.items() if key != "layer"]
            model, layer = generator.manifest.model, found["layer"]
            assert len(errors) == len(key_shapes(model, layer, 1) | state_shapes(model, layer))
            assert max(errors, default=0.0) < 1e-3


def test_a_reference_with_other_weights_does_not_hold(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "_run_reference", answer_here)
    model = zoo.model("llama")
    model.model.layers[3].mlp.up_proj.weight.data.mul_(1.5)
    model.save_pretrained(tmp_path / "other")
    rows = measure_parity(skipdecode.load(zoo.bundle("llama")), str(tmp_path / "other"))
    assert rows[0]["holds"] is False
    errors = {layer["layer"]: layer["max_key_error"] for layer in rows[0]["kv"]}
    assert errors[3] < 1e-3 < errors[4], "the KV buffer shows from which layer on it goes wrong"
