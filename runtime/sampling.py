"""From logits to tokens: greedy, or sampled with a generator that any language can repeat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skipdecode.errors import CapacityError
from skipdecode.kv_buffer import FloatArray, IntArray

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Raises:
        CapacityError: a value out of its range.
    """

    do_sample: bool = False  # False: greedy, the rest is not read
    temperature: float = 1.0  # above 0
    top_k: int = 0  # most likely tokens kept; 0: all
    top_p: float = 1.0  # least probability mass kept, most likely first; 1: all
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            (self.temperature > 0, "--temperature", self.temperature, "choose a number above 0"),
            (self.top_k >= 0, "--top-k", self.top_k, "choose 0 (all) or more"),
            (0 < self.top_p <= 1, "--top-p", self.top_p, "choose a number in (0, 1]"),
        )
        for holds, where, value, remedy in checks:
            if not holds:
                raise CapacityError(f"{value} is out of range", remedy, where=where)


def choose_tokens(logits: FloatArray, sampling: Sampling, rows: IntArray, step: int) -> IntArray:
    """One token a row.

    Args:
        logits: [B, V] float32.
        rows: [B] int64, the user's row numbers, so that a row's tokens do not depend on the batch's order.
        step: 0 for the token after the prompt.

    Returns:
        [B] int64.
    """
    if not sampling.do_sample:
        likeliest: IntArray = logits.argmax(axis=1)
        return likeliest
    order = np.argsort(-logits, axis=1, kind="stable")  # ties: lower id first
    scores = np.take_along_axis(logits, order, axis=1).astype(np.float64) / sampling.temperature
    if sampling.top_k:
        scores[:, sampling.top_k :] = -np.inf
    mass = np.exp(scores - scores[:, :1])
    cumulated = np.cumsum(mass, axis=1)
    kept = cumulated - mass < sampling.top_p * cumulated[:, -1:]
    cumulated = np.cumsum(mass * kept, axis=1)
    draws = np.array([uniform(sampling.seed, int(row), step) for row in rows])
    picks = (cumulated <= (draws * cumulated[:, -1])[:, None]).sum(axis=1)
    tokens: IntArray = np.take_along_axis(order, picks[:, None], axis=1)[:, 0]
    return tokens


def uniform(seed: int, row: int, step: int) -> float:
    """A number in [0, 1): the top 53 bits of splitmix64 (Steele et al. 2014) at `seed` + `row * 2^32 + step`, twice mixed."""
    value = (seed * 0x9E3779B97F4A7C15 + (row << 32) + step) & _MASK
    for _ in range(2):
        value = (value + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return float((value >> 11) * 2.0**-53)
