"""What a validation fills in, loads, scores and remembers, without measuring anything."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skipdecode import manifest as manifests
from skipdecode.validation import validate as validation
from skipdecode.validation.quality import Example
from skipdecode.validation.validate import ValidateRequest
from skipdecode.validation.workload import Request
from tests.models import LAYERS
from tests.zoo import Zoo


@pytest.mark.parametrize(
    ("max_batch", "max_length", "filled"),
    [
        (8, 2048, ((1, 4), (32, 512), 64, 64)),
        (2, 48, ((1, 2), (32, 40), 24, 24)),
        (1, 24, ((1,), (16,), 12, 12)),
        (1, 18, ((1,), (10,), 9, 9)),
    ],
)
def test_defaults_are_those_of_a_service_or_the_most_that_the_bundle_takes(
    max_batch: int, max_length: int, filled: tuple[Any, ...], zoo: Zoo
) -> None:
    manifest = manifests.read(zoo.bundle("opt"))
    limits = dataclasses.replace(manifest.limits, max_batch=max_batch, max_length=max_length)
    assert manifest.schedule.span == 10
    request = ValidateRequest(bundle=zoo.bundle("opt"))
    found = validation._fill_defaults(request, dataclasses.replace(manifest, limits=limits), max_length - 8, 0)
    assert (found.batches, found.contexts, found.prompt_tokens, found.new_tokens) == filled


def test_the_default_number_of_new_tokens_reaches_the_end_of_a_long_schedule() -> None:
    limits = SimpleNamespace(max_batch=1, max_length=2048)
    manifest: Any = SimpleNamespace(limits=limits, schedule=SimpleNamespace(span=100), variants=())
    assert validation._fill_defaults(ValidateRequest(bundle=Path()), manifest, 2000, 0).new_tokens == 101


def test_the_default_number_of_new_tokens_leaves_room_for_the_longest_example_but_reaches_the_schedules_end() -> None:
    limits = SimpleNamespace(max_batch=1, max_length=96)
    manifest: Any = SimpleNamespace(limits=limits, schedule=SimpleNamespace(span=8), variants=())
    for longest, new in ((0, 48), (74, 22), (90, 9)):
        assert validation._fill_defaults(ValidateRequest(bundle=Path()), manifest, 80, longest).new_tokens == new


def test_default_batches_fit_a_workload_of_few_requests(zoo: Zoo) -> None:
    bundle = zoo.bundle("opt")
    for count, batches in ((1, (1,)), (3, (1, 3)), (9, (1, 4))):
        request = ValidateRequest(bundle=bundle, requests=(Request(prompt_tokens=5, new_tokens=3),) * count)
        assert validation._fill_defaults(request, manifests.read(bundle), 20, 0).batches == batches


def test_resident_memory_is_that_of_one_target_only(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter((100, 300, 310, 360))
    monkeypatch.setattr(validation, "resident_bytes", lambda: next(measured))
    monkeypatch.setattr(validation, "Generator", lambda bundle, *, target, threads: (target, threads))
    manifest: Any = SimpleNamespace(targets=[SimpleNamespace(name="a"), SimpleNamespace(name="b")])
    loaded, resident = validation._load(ValidateRequest(bundle=Path(), threads=3), manifest)
    assert loaded == {"a": ("a", 3), "b": ("b", 3)}
    assert resident == {"a": 300, "b": 160}


def test_every_loss_is_against_full_depth(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "answer", lambda generator, examples, schedule, new: {"texts": [schedule.mean_layers]})
    monkeypatch.setattr(validation, "score", lambda texts, examples, baseline: {"baseline": baseline})
    generator: Any = SimpleNamespace(manifest=manifests.read(zoo.bundle("opt")))
    request = ValidateRequest(
        bundle=Path(), examples=(Example(prompt="a", references=("b",)),), new_tokens=4, speedups=(1.0, 1.5, 2.0)
    )
    rows = validation._measure_quality(generator, request, lambda what, measure: measure())
    assert [row["name"] for row in rows] == ["full depth", "bundle's own", "1.5x", "2x"]
    assert [row["own"] for row in rows] == [False, True, False, False]
    assert [row["baseline"] for row in rows] == [None, [LAYERS], [LAYERS], [LAYERS]]
    assert rows[1]["texts"] == [generator.manifest.schedule.mean_layers]


def test_a_run_is_not_resumed_with_other_examples_or_a_changed_reference(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    request = ValidateRequest(
        bundle=zoo.bundle("opt"), reference=str(tmp_path), examples=(Example(prompt="a", references=("b",)),)
    )
    edited = dataclasses.replace(request, examples=(Example(prompt="a", references=("c",)),))
    before = validation._identity(request, {})
    assert validation._identity(request, {}) == before != validation._identity(edited, {})
    (tmp_path / "model.safetensors").write_bytes(b"12")
    assert validation._identity(request, {}) != before
