"""From logits to tokens: greedy, or sampled with a generator that any language can repeat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skipdecode.errors import CapacityError
from skipdecode.kv_buffer import FloatArray, IntArray

_MASK = (1 << 64) - 1
_FIRST, _GROWTH = 256, 16  # likeliest tokens that are looked at first; times as many, where that was not enough


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
        if not self.do_sample:
            return
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
    most = min(sampling.top_k or logits.shape[1], logits.shape[1])
    size, waiting = (most if sampling.top_k else min(_FIRST, most)), np.arange(len(logits))
    top = logits.max(axis=1, keepdims=True)
    totals = _mass(logits, top, sampling).sum(axis=1) if size < most else np.zeros(len(logits))
    draws = np.array([uniform(sampling.seed, int(row), step) for row in rows])
    tokens: IntArray = np.zeros(len(logits), dtype=np.int64)
    while len(waiting):  # sorting a whole vocabulary takes longer than a decode step; the choice is nearly always among the first
        left = logits if len(waiting) == len(logits) else logits[waiting]
        ids = _likeliest(left, size)
        mass = _mass(np.take_along_axis(left, ids, axis=1), top[waiting], sampling)
        cumulated = mass.cumsum(axis=1)
        total = cumulated[:, -1] if size == most else totals[waiting]
        kept = (cumulated - mass < sampling.top_p * total[:, None]).sum(axis=1)
        ended = (kept < size) | (size == most)  # what top_p keeps lies within `ids`
        kept_mass = np.where(ended, np.take_along_axis(cumulated, kept[:, None] - 1, axis=1)[:, 0], total)
        picks = (cumulated <= (draws[waiting] * kept_mass)[:, None]).sum(axis=1)
        found = ended | ((sampling.top_p == 1) & (picks < size))
        tokens[waiting[found]] = np.take_along_axis(ids, np.minimum(picks, kept - 1)[:, None], axis=1)[found, 0]
        waiting, size = waiting[~found], min(_GROWTH * size, most)
    return tokens


def _mass(logits: FloatArray, top: FloatArray, sampling: Sampling) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Probability of each token over the likeliest one's."""
    below: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = logits.astype(np.float64) - top.astype(np.float64)
    with np.errstate(over="ignore"):  # at temperatures next to 0 all but the likeliest are infinitely far below it
        return np.exp(below / sampling.temperature)


def _likeliest(logits: FloatArray, count: int) -> IntArray:
    """Ids of each row's `count` likeliest tokens, likeliest first, of equals the lower id first."""
    if count >= logits.shape[1]:
        return np.argsort(-logits, axis=1, kind="stable")
    bounds = -np.partition(-logits, count - 1, axis=1)[:, count - 1]
    rows = []
    for row, bound in zip(logits, bounds, strict=True):
        known = np.flatnonzero(~(row < bound))  # more than `count` where tokens are equal
        rows.append(known[np.argsort(-row[known], kind="stable")[:count]])
    return np.stack(rows)


def uniform(seed: int, row: int, step: int) -> float:
    """A number in [0, 1): the top 53 bits of splitmix64 (Steele et al. 2014) at `seed` + `row * 2^32 + step`, twice mixed."""
    value = (seed * 0x9E3779B97F4A7C15 + (row << 32) + step) & _MASK
    for _ in range(2):
        value = (value + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return float((value >> 11) * 2.0**-53)
