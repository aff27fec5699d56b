"""Repeated measurements whose spread is known."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Order statistics of n measurements, in their unit."""

    n: int
    median: float
    low: float  # 95 % confidence interval of the median
    high: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarise one or more measurements.

        The interval lies between two order statistics, whatever the distribution (Le Boudec, Performance Evaluation, theorem
        2.1), as many ranks from the lowest value as from the highest. Below six measurements it is their range, which then
        covers the median in less than 95 % of cases.
        """
        ordered, n = np.sort(np.asarray(values, dtype=np.float64)), len(values)
        margin = 0.98 * math.sqrt(n)
        low, high = max(0, math.floor(n / 2 - margin) - 1), min(n - 1, math.ceil(n / 2 + margin))  # ranks from 0
        p50, p90, p99 = np.percentile(ordered, [50, 90, 99])
        return cls(
            n=n, median=float(p50), low=float(ordered[low]), high=float(ordered[high]), p90=float(p90), p99=float(p99)
        )  # fmt: skip

    @property
    def spread(self) -> float:
        """Half the interval's width over the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to measure: until every median is known to within `spread`, or the time is spent."""

    rounds: int  # at least, after a warm-up that is not counted
    spread: float = 0.02
    seconds: float = 4.0


def interleave(measures: dict[Any, Callable[[], float]], effort: Effort) -> dict[Any, list[float]]:
    """Call each measure once a round, so that what slows a round slows them all. Returns each measure's values, one per round."""
    values: dict[Any, list[float]] = {key: [] for key in measures}
    for measure in measures.values():
        measure()  # warm-up: first touch of weights and buffers, binding
    started = time.perf_counter()
    for round_ in range(1, 1000):
        for key, measure in measures.items():
            values[key].append(measure())
        enough = round_ >= effort.rounds
        if enough and time.perf_counter() - started > effort.seconds:
            break
        if enough and round_ >= 6 and all(Summary.of(series).spread <= effort.spread for series in values.values()):
            break
    return values
