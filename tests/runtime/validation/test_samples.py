"""Medians whose spread is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from skipdecode.validation.samples import Effort, Summary, interleave


def test_the_interval_holds_the_true_median_in_about_95_of_100_cases() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        summary = Summary.of(rng.exponential(size=40).tolist())
        hits += summary.low <= np.log(2) <= summary.high
    assert 930 <= hits <= 995


def test_order_statistics_are_of_the_sorted_values_and_an_outlier_does_not_move_them() -> None:
    summary = Summary.of([*reversed(range(100)), 1e6])
    # of 101 the theorem takes the 40th and the 62nd
    assert summary == Summary(n=101, median=50, low=39, high=61, p90=90, p99=99)


def test_the_interval_covers_the_median_in_95_of_100_cases_whatever_the_number_of_measurements() -> None:
    for n in range(6, 200):
        summary = Summary.of([float(rank) for rank in range(n)])
        low, high = int(summary.low), int(summary.high)
        assert low + high == n - 1
        below = [math.comb(n, count) / 2**n for count in range(n + 1)]  # the probability that so many lie below the median
        assert sum(below[low + 1 : high + 1]) >= 0.95, n


def test_a_single_measurement_is_its_own_median() -> None:
    summary = Summary.of([3.0])
    assert (summary.n, summary.median, summary.low, summary.high, summary.p99) == (1, 3.0, 3.0, 3.0, 3.0)
    assert summary.spread == Summary.of([0.0]).spread == 0


def test_measures_take_turns_and_the_first_turn_does_not_count() -> None:
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    values = interleave({name: lambda n=name: measure(n) for name in "ab"}, Effort(rounds=2, seconds=0.0))
    assert calls[:6] == ["a", "b", "a", "b", "a", "b"]
    assert values["a"][:2] == [3.0, 5.0] and values["b"][:2] == [4.0, 6.0]


def test_rounds_go_on_until_every_median_is_known() -> None:
    rng = np.random.default_rng(0)
    measures = {"steady": lambda: 1.0, "noisy": lambda: float(rng.normal(1.0, 0.1))}
    values = interleave(measures, Effort(rounds=2, spread=0.02, seconds=60))
    assert len(values["steady"]) == len(values["noisy"]) > 20
    assert Summary.of(values["noisy"]).spread <= 0.02
    few = interleave({"steady": lambda: 1.0}, Effort(rounds=2, spread=0.02, seconds=60))
    assert len(few["steady"]) == 6


def test_the_spread_is_half_the_interval_over_the_median() -> None:
    summary = Summary(n=9, median=10.0, low=9.0, high=11.0, p90=11.0, p99=11.0)
    assert summary.spread == pytest.approx(0.1)
