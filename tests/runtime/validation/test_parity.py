"""When a difference from the reference is a failure."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import skipdecode
from skipdecode import manifest as manifests
from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule import full_depth
from skipdecode.schedule_builders import ScheduleRequest
from skipdecode.validation import parity
from tests.models import LAYERS
from tests.runtime.validation.conftest import answer_here
from tests.zoo import Zoo, edit_config


@pytest.mark.parametrize(
    ("weights", "relative", "median", "rounding", "holds"),
    [
        ("fp32", 0.9e-3, 1.0, None, True),
        ("fp32", 1.1e-3, 1.0, None, False),
        ("fp32", math.nan, math.nan, None, False),
        ("fp16", 1.0, 0.19, None, True),
        ("fp16", 1.0, 0.21, None, False),
        ("bf16", 1.0, 0.39, None, True),
        ("bf16", 1.0, 0.41, None, False),
        ("int8", 1.0, 0.059, 0.01, True),
        ("int8", 1.0, 0.061, 0.01, False),
        ("int8", 1.0, 0.39, 1.0, True),
        ("int8", 1.0, 0.41, 1.0, False),
        ("int8", 1.0, 0.41, math.inf, False),
        ("int4", 1.0, 0.19, 0.1, True),
        ("int4", 1.0, 0.21, 0.1, False),
        ("int4", 1.0, 1.24, 1.0, True),
        ("int4", 1.0, 1.26, 1.0, False),
        ("int4", 1.0, 0.9e-3, 0.0, True),
        ("int4", 1.0, 1.1e-3, 0.0, False),
        ("int4", math.nan, 0.1, 1.0, False),
        ("int4", math.inf, 0.1, 1.0, False),
    ],
)
def test_exact_weights_are_held_to_a_thousandth_and_others_to_a_bound_on_the_median_step(
    weights: str, relative: float, median: float, rounding: float | None, holds: bool, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {"relative_error": relative, "median_error": median, "rounding_error": rounding}
    for name, fake in (("_run_reference", None), ("load_file", {}), ("_compare", errors)):
        monkeypatch.setattr(parity, name, lambda *_, fake=fake: fake)
    manifest = manifests.read(zoo.bundle("opt"))
    target, engines = SimpleNamespace(name="cpu", weights=weights), SimpleNamespace(slots=None)
    generator: Any = SimpleNamespace(manifest=manifest, target=target, engines=engines)
    rows = parity.measure_parity(generator, "")
    assert [row["name"] for row in rows] == [*(variant.name for variant in manifest.variants), f"v{LAYERS}, 45 tokens"]
    assert all(row["holds"] is holds for row in rows)
    assert {row["bound_of"] for row in rows} == {"the largest logit" if weights == "fp32" else "the median step's logits"}


@pytest.mark.parametrize(
    ("max_batch", "max_length", "slots", "lengths"),
    [
        (4, 2048, None, ([23, 7, 1], [600, 1])),
        (1, 2048, None, ([23], [600])),
        (4, 2048, (256, 2048), ([23, 7, 1], [253, 1])),
        (4, 20, None, ([12, 7, 1], [17, 1])),
        (4, 9, None, ([1], [6, 1])),
        (4, 5, None, ([1], [2, 1])),
    ],
)
def test_prompts_are_as_long_and_as_many_as_the_bundle_takes(
    max_batch: int, max_length: int, slots: tuple[int, ...] | None, lengths: tuple[list[int], ...]
) -> None:
    limits, model = SimpleNamespace(max_batch=max_batch, max_length=max_length), SimpleNamespace(vocab_size=9)
    manifest, engines = SimpleNamespace(limits=limits, model=model), SimpleNamespace(slots=slots)
    generator: Any = SimpleNamespace(manifest=manifest, engines=engines)
    asked = ((parity.PROMPT_LENGTHS, parity.NEW_TOKENS), (parity.LONG_PROMPT_LENGTHS, parity.LONG_NEW_TOKENS))
    assert tuple([len(prompt) for prompt in parity._prompts(generator, *each)] for each in asked) == lengths


@pytest.mark.parametrize(("max_length", "long"), [(26, []), (27, [f"v{LAYERS}, 24 tokens"])])
def test_a_long_prompt_runs_where_one_fits_that_is_longer_than_the_short_ones(max_length: int, long: list[str], zoo: Zoo) -> None:
    made = manifests.read(zoo.bundle("opt"))
    manifest = dataclasses.replace(made, limits=dataclasses.replace(made.limits, max_length=max_length))
    generator: Any = SimpleNamespace(manifest=manifest, engines=SimpleNamespace(slots=None))
    assert [run.name for run in parity._runs(generator)] == [*(variant.name for variant in made.variants), *long]


@pytest.mark.parametrize(
    ("target", "weights", "rounding"),
    [
        ("cpu", "fp32", None),
        ("cpu", "int8", {"bits": 8, "whole_rows": False}),
        ("tensorrt-rtx", "int8", {"bits": 8, "whole_rows": True}),
        ("tensorrt-rtx", "int4", {"bits": 4, "whole_rows": False}),
    ],
)
def test_the_reference_is_rounded_as_the_target_is(
    target: str, weights: str, rounding: object, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    errors = iter([{"relative_error": 0.1, "median_error": 0.055, "rounding_error": error} for error in (0.01, *[0.005] * 9)])
    monkeypatch.setattr(parity, "_run_reference", lambda request, out: asked.append(request))
    monkeypatch.setattr(parity, "load_file", lambda path: {})
    monkeypatch.setattr(parity, "_compare", lambda *_: next(errors))
    made: Any = SimpleNamespace(name=target, weights=weights)
    generator: Any = SimpleNamespace(manifest=manifests.read(zoo.bundle("opt")), target=made, engines=SimpleNamespace(slots=None))
    rows = parity.measure_parity(generator, "")
    assert asked[0].get("rounding") == rounding
    bounds = {"fp32": parity.TOLERANCE, "int8": 0.06, "int4": 0.02}  # of the run that rounding changes most, for all alike
    assert {row["bound"] for row in rows} == {bounds[weights]}


def test_errors_are_those_of_the_worst_row_at_the_valid_positions_when_fed_the_references_tokens() -> None:
    expected = np.tile(np.array([4.0, 0.0, 3.0]), (2, 3, 1))  # [B, new, V]; a step's norm is 5
    logits = expected.copy()
    logits[..., 0] += [[0.5, 1.0, -5.0], [0.5, -1.5, -2.0]]
    keys = np.full((2, 2, 1, 4, 2), np.nan)  # of two layers, [B, KVH, C, D] each
    keys[:, :, :, :2] = 1.0
    reference: dict[str, Any] = {}
    for row, valid in enumerate((2, 1)):
        reference |= {f"v2.{row}.tokens": np.zeros(3, dtype=np.int64), f"v2.{row}.logits": expected[row]}
        reference |= {f"v2.{row}.past_key.{layer}": keys[layer, row, :, :valid].copy() for layer in range(2)}
    reference["v2.0.past_key.0"][0, 1, 1] += 0.5
    reference["v2.1.past_key.0"] -= 0.25
    reference["v2.1.past_key.1"] -= 0.125
    decoder: Any = SimpleNamespace(
        kv=SimpleNamespace(layer_arrays=lambda layer, rows: {f"past_key.{layer}": keys[layer, rows]}),
        memory=SimpleNamespace(to_host=lambda array: array),
    )
    fed: list[Any] = []

    def step(tokens: Any) -> None:
        decoder.logits = logits[:, len(fed)]
        fed.append(tokens)

    decoder.prefill = decoder.decode_step = step
    generator: Any = SimpleNamespace(decoder=lambda *_: decoder)
    found = parity._compare(generator, parity._Run("v2", full_depth(2), [[5, 6], [7]], 3), reference)
    assert [each if isinstance(each, list) else each.tolist() for each in fed] == [[[5, 6], [7]], [0, 0], [0, 0]]
    assert found == {
        "max_logit_error": 5.0, "mean_logit_error": pytest.approx(10.5 / 18), "relative_error": 1.25,
        "median_error": pytest.approx(0.3), "rounding_error": None, "first_token_that_differs": 1,
        "kv": [{"layer": 0, "max_key_error": 0.5}, {"layer": 1, "max_key_error": 0.125}],
    }  # fmt: skip
    reference |= {f"v2.{row}.rounded": logits[row] for row in range(2)}
    fed.clear()
    assert parity._compare(generator, parity._Run("v2", full_depth(2), [[5, 6], [7]], 3), reference)["rounding_error"] == 0.3


def test_a_window_that_only_long_prompts_fill_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        num_hidden_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, vocab_size=99,
        max_position_embeddings=640, sliding_window=64, pad_token_id=1, bos_token_id=0, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    folder = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    schedule = ScheduleRequest(speedup=1.5, span=8, max_variants=2)
    export(ExportRequest(model=str(folder), out=tmp_path / "b", schedule=schedule, max_batch=2, max_length=640))
    generator = skipdecode.load(tmp_path / "b")
    monkeypatch.setattr(parity, "_run_reference", answer_here)
    right = parity.measure_parity(generator, str(folder))
    edit_config(folder, sliding_window=None)
    wrong = parity.measure_parity(generator, str(folder))
    assert all(row["holds"] for row in right)
    assert [row["name"] for row in wrong if not row["holds"]] == ["v4, 600 tokens"]


@pytest.mark.parametrize("name", ["opt", "mixtral", "qwen3_5_text"])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_quantised_bundle_agrees_with_its_own_model_and_not_with_another(
    name: str, quantize: str, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, schedule = zoo.checkpoint(name), ScheduleRequest(name="linear", max_layers=LAYERS, min_layers=2, span=10)
    export(
        ExportRequest(model=str(checkpoint), out=tmp_path / "b", schedule=schedule, quantize=quantize, max_batch=4, max_length=48)
    )
    generator = skipdecode.load(tmp_path / "b")
    monkeypatch.setattr(parity, "_run_reference", answer_here)
    assert all(row["holds"] for row in parity.measure_parity(generator, str(checkpoint)))
    torch.manual_seed(1)
    model = zoo.model(name)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "other")
    assert not any(row["holds"] for row in parity.measure_parity(generator, str(tmp_path / "other")))


def test_two_layers_that_were_exchanged_are_found_in_an_int8_bundle(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, out = zoo.checkpoint("llama"), tmp_path / "bundle"
    full = ScheduleRequest(name="full")
    export(ExportRequest(model=str(checkpoint), out=out, schedule=full, quantize="int8", max_batch=4, max_length=48))
    model = zoo.model("llama")
    first, second = (model.model.layers[index] for index in (1, 2))
    kept = {name: weight.clone() for name, weight in first.state_dict().items()}
    first.load_state_dict(second.state_dict())
    second.load_state_dict(kept)
    model.save_pretrained(tmp_path / "exchanged")
    monkeypatch.setattr(parity, "_run_reference", answer_here)
    generator = skipdecode.load(out)
    assert all(row["holds"] for row in parity.measure_parity(generator, str(checkpoint)))
    assert not any(row["holds"] for row in parity.measure_parity(generator, str(tmp_path / "exchanged")))


def test_logits_that_are_the_same_for_all_tokens_are_infinitely_far_off(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = skipdecode.load(zoo.bundle("opt"))
    monkeypatch.setattr(parity, "_run_reference", answer_here)
    made = generator.decoder

    def silent(*given: Any) -> Any:
        decoder = made(*given)
        decoder.prefill = decoder.decode_step = lambda *_: decoder.logits.fill(0)
        return decoder

    monkeypatch.setattr(generator, "decoder", silent)
    rows = parity.measure_parity(generator, str(zoo.checkpoint("opt")))
    assert {row["median_error"] for row in rows} == {math.inf}


@pytest.mark.parametrize(
    ("status", "output", "says"),
    [
        (2, "a warning\nx/model: cannot be read; repair it\n", "^x/model: cannot be read; repair it$"),
        (
            1,
            "Traceback\nModuleNotFoundError: No module named 'torch'\n",
            r"^--reference: needs the export extra \(ModuleNotFoundError: .*'torch'\); pip install 'skipdecode\[export\]'$",
        ),
        (-9, "", r"^--reference: the reference ended with status -9 \(no output\); check that it fits in memory$"),
        (1, "RuntimeError: can't allocate memory", r"with status 1 \(RuntimeError: .*\); check that it fits in memory$"),
        (1, "KeyError: 'x'", r"with status 1 \(KeyError: 'x'\); check that transformers loads it$"),
    ],
)
def test_a_reference_that_fails_is_reported_in_one_line(
    status: int, output: str, says: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = SimpleNamespace(returncode=status, stderr=output)
    monkeypatch.setattr(parity.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(ModelNotSupportedError, match=says):
        parity.check_reference(manifests.read(zoo.bundle("opt")), "x/model")
