"""An earlier run beside this one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from skipdecode.errors import CapacityError
from skipdecode.validation.baseline import compare, read_baseline


def _summary(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.9 * median, "high": 1.1 * median}


RUN: dict[str, Any] = {
    "validation_format": 1,
    "machine": {"cpu": "x"},
    "targets": [
        {
            "name": "cpu",
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
    assert compared["same_machine"]
    assert {row["name"]: row["verdict"] for row in compared["rows"]} == {
        "cpu, batch 1, context 32: prefill": "same",
        "cpu, batch 1, context 32: v6": "slower",
        "cpu, workload, batch 1: first token": "same",
        "cpu, workload, batch 1: token": "faster",
    }


def test_what_one_process_differs_from_the_next_by_is_not_significant() -> None:
    new = copy.deepcopy(RUN)
    for ratio, verdict in ((1.08, "same"), (1.12, "slower"), (0.95, "same"), (0.89, "faster")):
        median = 2 * ratio
        new["targets"][0]["latency"][0]["variants"][0]["ms"] = {"median": median, "low": median, "high": median}
        old = copy.deepcopy(RUN)
        old["targets"][0]["latency"][0]["variants"][0]["ms"] = {"median": 2, "low": 2, "high": 2}
        assert [row["verdict"] for row in compare(new, old)["rows"] if row["name"].endswith("v6")] == [verdict]


def test_what_only_one_of_the_runs_measured_is_left_out() -> None:
    new = copy.deepcopy(RUN)
    new["targets"][0]["latency"][0]["context"] = 64
    assert len(compare(new, RUN)["rows"]) == 2


def test_another_machine_is_told() -> None:
    assert not compare({**RUN, "machine": {"cpu": "y"}}, RUN)["same_machine"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"a": 1}',
        '{"validation_format": 1, "targets": 3}',
        '{"validation_format": 1, "machine": [], "targets": []}',
        json.dumps(RUN).replace('"median"', '"mean"'),
        json.dumps(RUN).replace("0.9", '"fast"'),
        json.dumps(RUN).replace('"token_ms": {"median": 1', '"token_ms": {"median": 0'),
    ],
)
def test_a_file_that_is_no_earlier_run_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(CapacityError, match="skip-validate --json"):
        read_baseline(path)
    with pytest.raises(CapacityError, match="cannot be read"):
        read_baseline(tmp_path / "nowhere")
    path.write_text(json.dumps(RUN))
    assert read_baseline(path) == RUN
