"""Objectives: how they are written, what they need, when they hold."""

from __future__ import annotations

import math
from typing import Any

import pytest

from skipdecode.errors import CapacityError
from skipdecode.validation.slo import NAMES, check_measured, judge, parse_slo

SUMMARY = {"n": 9, "median": 10.0, "low": 9.0, "high": 11.0, "p90": 20.0, "p99": 30.0}
SLOWER = {key: 2 * value for key, value in SUMMARY.items()}


def _load(batch: int, summary: dict[str, float]) -> dict[str, Any]:
    own = {"ttft_ms": summary, "token_ms": summary, "tokens_per_s": summary}
    return {"batch": batch, "own": own, "decode_gain": {"median": 1.5 + batch}, "end_to_end_gain": {"median": 1.25}}


TARGET = {
    "workloads": [_load(1, SUMMARY), _load(4, SLOWER)],
    "memory": {"resident_bytes": 64 << 20},
    "parity": [{"max_logit_error": 1e-6}, {"max_logit_error": 3e-6}],
    "quality": [
        {"own": False, "bleu": {"value": 70.0}, "rouge_l": {"value": 72.0}},
        {"own": True, "bleu": {"value": 68.5}, "rouge_l": {"value": 71.0}},
    ],
}


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("p99_token_ms<=60", 60.0, True),
        ("p99_token_ms < 60", 60.0, False),
        ("p50_token_ms<=19.5", 20.0, False),
        ("p90_ttft_ms<=40", 40.0, True),
        ("tokens_per_s>=12", 10.0, False),
        ("decode_gain>=2.5", 2.5, True),
        ("end_to_end_gain>1.3", 1.25, False),
        ("resident_mib<=64", 64.0, True),
        ("max_logit_error<=1e-6", 3e-6, False),
        ("bleu>=68", 68.5, True),
        ("rouge_l>=71.5", 71.0, False),
    ],
)
def test_the_worst_figure_decides(text: str, value: float, holds: bool) -> None:
    (row,) = judge([parse_slo(text)], TARGET)
    assert (row["value"], row["holds"]) == (value, holds)
    turned = {**TARGET, "workloads": TARGET["workloads"][::-1], "parity": TARGET["parity"][::-1]}
    assert judge([parse_slo(text)], turned) == [row]


@pytest.mark.parametrize(
    ("text", "value", "told"),
    [
        ("tokens_per_s<=30", 30.003, "30.003"),
        ("tokens_per_s<=30", 30.00000001, "30.00000001"),
        ("tokens_per_s<30", 30.0, "30"),
        ("tokens_per_s>=30", 29.99999999, "29.99999999"),
        ("tokens_per_s>=30", 30.00000001, "30.00000001"),
        ("tokens_per_s<=10240.25", 10240.5, "10240.5"),
        ("tokens_per_s<=123456.77", 123456.76, "123456.76"),
        ("tokens_per_s<=1", math.nan, "nan"),
    ],
)
def test_a_measured_value_is_never_rounded_to_the_bound(text: str, value: float, told: str) -> None:
    (row,) = judge([parse_slo(text)], {"workloads": [{"own": {"tokens_per_s": {"median": value}}}]})
    assert row["slo"] == text
    assert row["measured"] == told


def test_p90_and_p99_say_how_many_measurements_they_are_of() -> None:
    told = {name: judge([parse_slo(f"{name}<=1")], TARGET)[0]["measured"] for name in NAMES}
    assert (told["p90_token_ms"], told["p99_ttft_ms"]) == ("40 (of 18)", "60 (of 18)")
    assert [name for name, text in told.items() if "of" in text] == [
        "p90_token_ms", "p99_token_ms", "p90_ttft_ms", "p99_ttft_ms",
    ]  # fmt: skip


@pytest.mark.parametrize("errors", [(0.1, math.nan), (math.nan, 0.1)])
def test_nan_is_within_no_bound(errors: tuple[float, ...]) -> None:
    target = {**TARGET, "parity": [{"max_logit_error": error} for error in errors]}
    (row,) = judge([parse_slo("max_logit_error<=1")], target)
    assert math.isnan(row["value"]) and row["holds"] is False


def test_every_name_can_be_judged() -> None:
    assert len(judge([parse_slo(f"{name}<=1e9") for name in NAMES], TARGET)) == len(NAMES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("p99_token_s<=1", "'p99_token_s' is not measured; choose one of p50_token_ms"),
        ("p99_token_ms<=30s", "unit 's' after the number; leave it out: the name p99_token_ms includes the unit"),
        ("p99_token_ms<=30 ms", "unit 'ms' after the number"),
        ("p99_token_ms=30", "is not an objective"),
        ("p99_token_ms", "is not an objective"),
        ("", "is not an objective"),
        ("bleu>=1.2.3", "'1.2.3' is not a number"),
        ("p99_token_ms<=1e999", "'1e999' is not a number"),
    ],
)
def test_an_objective_that_cannot_be_read_is_reported_in_one_line(text: str, says: str) -> None:
    with pytest.raises(CapacityError, match=says) as caught:
        parse_slo(text)
    assert "\n" not in str(caught.value)


def test_an_objective_on_something_not_measured_is_refused() -> None:
    with pytest.raises(CapacityError, match="bleu is measured only with --eval; add --eval"):
        check_measured([parse_slo("bleu>=60")], {"--reference"})
    with pytest.raises(CapacityError, match="rouge_l is measured only with --eval; add --eval"):
        check_measured([parse_slo("rouge_l>=60")], {"--reference"})
    with pytest.raises(CapacityError, match="max_logit_error is measured only with --reference; add --reference"):
        check_measured([parse_slo("max_logit_error<=1")], {"--eval"})
    check_measured([parse_slo("bleu>=60"), parse_slo("tokens_per_s>1")], {"--eval"})
    with pytest.raises(CapacityError, match="p99_token_ms is measured only with --new-tokens 2; add"):
        check_measured([parse_slo("p99_ttft_ms<=9"), parse_slo("p99_token_ms<=9")], set())
    with pytest.raises(CapacityError, match="p99_token_ms is measured only with a request of 2 new_tokens in --workload; add"):
        check_measured([parse_slo("p99_token_ms<=9")], set(), in_workload=True)
