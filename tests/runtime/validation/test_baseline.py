"""An earlier run compared with this one."""

from __future__ import annotations

import copy
import functools
import json
import operator
from pathlib import Path
from typing import Any

import pytest

from skipdecode.errors import CapacityError
from skipdecode.validation.baseline import compare, read_baseline


def _summary(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.9 * median, "high": 1.1 * median}


RUN: dict[str, Any] = {
    "validation_format": 1,
    "machine": {"cpu": "x", "cores": 2, "gpu": None},
    "bundle": {"model": {"name": "opt", "layers": 6}, "schedule": {"name": "linear", "speedup": 2.0}},
    "settings": {"prompt_tokens": 64, "new_tokens": 65, "workload": None},
    "targets": [
        {
            "name": "cpu",
            "runs": True,
            "weights": "fp32",
            "threads": 2,
            "latency": [
                {"batch": 1, "context": 32, "prefill_ms": _summary(9), "variants": [{"name": "v6", "ms": _summary(2)}]},
            ],
            "workloads": [{"batch": 1, "own": {"ttft_ms": _summary(8), "token_ms": _summary(1)}}],
        },
        {"name": "cuda", "runs": False},
    ],
}


def test_only_medians_whose_intervals_lie_apart_are_slower_or_faster() -> None:
    new = copy.deepcopy(RUN)
    new["targets"][0]["latency"][0]["variants"][0]["ms"] = _summary(3)
    new["targets"][0]["latency"][0]["prefill_ms"] = _summary(9.9)
    new["targets"][0]["workloads"][0]["own"]["token_ms"] = _summary(0.5)
    compared = compare(new, RUN)
    assert compared["differs"] == []
    assert {row["name"]: row["verdict"] for row in compared["rows"]} == {
        "cpu, batch 1, context 32: prefill": "same",
        "cpu, batch 1, context 32: v6": "slower",
        "cpu, workload, batch 1: first token": "same",
        "cpu, workload, batch 1: token": "faster",
    }


def test_differences_between_one_process_and_the_next_are_not_significant() -> None:
    new = copy.deepcopy(RUN)
    for ratio, verdict in ((1.08, "same"), (1.12, "slower"), (0.95, "same"), (0.905, "faster")):
        median = 2 * ratio
        new["targets"][0]["latency"][0]["variants"][0]["ms"] = {"median": median, "low": median, "high": median}
        old = copy.deepcopy(RUN)
        old["targets"][0]["latency"][0]["variants"][0]["ms"] = {"median": 2, "low": 2, "high": 2}
        assert [row["verdict"] for row in compare(new, old)["rows"] if row["name"].endswith("v6")] == [verdict]


@pytest.mark.parametrize(("low", "high", "verdict"), [(2.5, 3.5, "slower"), (2.2, 3.5, "same"), (2.1, 3.5, "same")])
def test_however_much_a_median_moved_the_intervals_must_lie_apart(low: float, high: float, verdict: str) -> None:
    old, new = copy.deepcopy(RUN), copy.deepcopy(RUN)
    new["targets"][0]["latency"][0]["variants"][0]["ms"] = {"median": 3.0, "low": low, "high": high}
    assert [row["verdict"] for row in compare(new, old)["rows"] if row["name"].endswith("v6")] == [verdict]
    back = {"slower": "faster", "same": "same"}[verdict]
    assert [row["verdict"] for row in compare(old, new)["rows"] if row["name"].endswith("v6")] == [back]


def test_every_target_is_compared() -> None:
    two = copy.deepcopy(RUN)
    two["targets"][1] = {**RUN["targets"][0], "name": "cuda"}
    assert [row["name"].partition(",")[0] for row in compare(two, two)["rows"]] == ["cpu"] * 4 + ["cuda"] * 4


def test_figures_that_only_one_run_has_are_left_out() -> None:
    new = copy.deepcopy(RUN)
    new["targets"][0]["latency"][0]["context"] = 64
    assert len(compare(new, RUN)["rows"]) == 2


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("machine", "cpu"), "y", "cpu: x, now y"),
        (("machine", "cores"), 99, "cores: 2, now 99"),
        (("machine", "gpu"), "NVIDIA H200", "gpu: None, now NVIDIA H200"),
        (("bundle", "model", "name"), "llama", "model: opt, now llama"),
        (("bundle", "model", "layers"), 4, "layers: 6, now 4"),
        (("bundle", "schedule", "speedup"), 3.0, "schedule: linear, 2.00x fewer layers, now linear, 3.00x fewer layers"),
        (("targets", 0, "threads"), 1, "cpu, threads: 2, now 1"),
        (("targets", 0, "weights"), "int8", "cpu, weights: fp32, now int8"),
    ],
)
def test_other_differences_between_the_runs_are_reported(path: tuple[Any, ...], value: Any, told: str) -> None:
    new = copy.deepcopy(RUN)
    *holders, name = path
    functools.reduce(operator.getitem, holders, new)[name] = value
    assert compare(new, RUN)["differs"] == [told]


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        (28.8, 15.5, ["cpu, memory bandwidth: 28.8 GB/s, now 15.5"]),
        (15.5, 28.8, ["cpu, memory bandwidth: 15.5 GB/s, now 28.8"]),
        (15.0, 16.0, []),
        (None, 16.0, []),
    ],
)
def test_another_memory_bandwidth_is_reported(then: float | None, now: float, told: list[str]) -> None:
    old, new = copy.deepcopy(RUN), copy.deepcopy(RUN)
    old["targets"][0]["read_gb_per_s"], new["targets"][0]["read_gb_per_s"] = then, now
    assert compare(new, old)["differs"] == told


def test_a_run_that_was_resumed_is_reported() -> None:
    resumed = {**RUN, "resumed": 3}
    says = "run resumed one that was stopped: 3 measurements are from another time"
    assert compare(RUN, resumed)["differs"] == [f"the earlier {says}"]
    assert compare(resumed, RUN)["differs"] == [f"this {says}"]


def test_a_run_from_before_the_gpu_was_named_is_compared() -> None:
    old = copy.deepcopy(RUN)
    del old["machine"]["gpu"]
    new = copy.deepcopy(RUN)
    new["machine"]["gpu"] = "NVIDIA H200"
    assert compare(new, old)["differs"] == []


def test_a_workload_of_one_new_token_has_no_time_of_a_step_to_compare(tmp_path: Path) -> None:
    new = copy.deepcopy(RUN)
    new["targets"][0]["workloads"][0]["own"]["token_ms"] = None
    (path := tmp_path / "old.json").write_text(json.dumps(new))
    names = [row["name"] for row in compare(new, read_baseline(path))["rows"]]
    assert names[2:] == ["cpu, workload, batch 1: first token"]


@pytest.mark.parametrize(("setting", "value"), [("new_tokens", 2), ("workload", [{"prompt_tokens": 64, "new_tokens": 65}])])
def test_workloads_of_other_lengths_are_not_compared(setting: str, value: Any) -> None:
    new = copy.deepcopy(RUN)
    new["settings"][setting] = value
    compared = compare(new, RUN)
    assert compared["differs"] == ["the workload, which is left out here"]
    assert [row["name"] for row in compared["rows"]] == ["cpu, batch 1, context 32: prefill", "cpu, batch 1, context 32: v6"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"a": 1}',
        '{"validation_format": 1, "targets": 3}',
        '{"validation_format": 1, "machine": [], "targets": []}',
        json.dumps({key: value for key, value in RUN.items() if key != "validation_format"}),
        json.dumps({**RUN, "settings": {}}),
        json.dumps({**RUN, "bundle": None}),
        json.dumps({**RUN, "resumed": "3"}),
        json.dumps({**RUN, "targets": [{**RUN["targets"][0], "read_gb_per_s": 0}]}),
        json.dumps({**RUN, "targets": [{**RUN["targets"][0], "read_gb_per_s": "fast"}]}),
        json.dumps(RUN).replace('"speedup": 2.0', '"speedup": "2x"'),
        json.dumps(RUN).replace('"median"', '"mean"'),
        json.dumps(RUN).replace("0.9", '"fast"'),
        json.dumps(RUN).replace('"token_ms": {"median": 1', '"token_ms": {"median": 0'),
        json.dumps(RUN).replace('"token_ms": {"median": 1', '"token_ms": {"median": Infinity, "was": 1'),
    ],
)
def test_a_file_that_is_not_an_earlier_run_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(CapacityError, match="skip-validate --json"):
        read_baseline(path)
    with pytest.raises(CapacityError, match="cannot be read"):
        read_baseline(tmp_path / "nowhere")
    path.write_text(json.dumps(RUN))
    assert read_baseline(path) == RUN
