"""Weights that lie on levels already, because their checkpoint was quantised, in the blocks of `QuantizeWeightsPass`, exactly.

Rounding them anew takes other levels (a block's largest number decides on them), and so loses what GPTQ, AWQ or training have
won: normal weights in 4 bits and groups of 128 are 0.10 to 0.11 off (relative norm), after `rtn` in blocks of 32 0.12 to 0.14.

The levels are found in the numbers, not handed over: by then matrices are joined, turned and put in another order. A block's step
is the largest number of which all its numbers are multiples (Euclid's algorithm), as they are where the block lies in one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

_EXACT = 1e-3  # steps that a number may be off, where it is what scale and level gave
_ENOUGH = 0.9  # of the blocks; the few whose step is not found, because their numbers are too far apart, are rounded to nearest
_ROUNDS = 8  # of Euclid's algorithm
_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """(levels - zeros) * scales is the weight."""

    levels: Bytes  # [N, K / block, block]
    scales: Floats  # [N, K / block]
    zeros: Bytes  # [N, K / block]


def kept_levels(weight: Floats, bits: int, block: int) -> Levels | None:
    """A matrix [N,K] that lies on at most 2 ** `bits` levels in each block of inputs, 0 among them; None: it does not."""
    rows, columns = weight.shape
    sample = weight[:: max(1, rows // 8)].reshape(-1, block)
    allowed = [_EXACT, *(noise for noise in [2 * _rounding(sample) * (1 << bits)] if _EXACT < noise < 0.25)]
    noise = next((noise for noise in allowed if _steps(sample, noise, 1 << bits)[2].mean() >= _ENOUGH), None)
    if noise is None:  # most matrices: no time is lost with them
        return None
    shape = (rows, columns // block)
    found = Levels(
        levels=np.empty((*shape, block), np.uint8), scales=np.empty(shape, np.float32), zeros=np.empty(shape, np.uint8)
    )
    on_levels = 0
    for start in range(0, rows, _ROWS_AT_A_TIME):
        part = slice(start, start + _ROWS_AT_A_TIME)
        steps, multiples, fits = _steps(weight[part].reshape(-1, block), noise, 1 << bits)
        on_levels += int(fits.sum())
        lowest, highest = multiples.min(1, keepdims=True), multiples.max(1, keepdims=True)
        middle = (1 << bits) // 2  # a zero point that need not be stored, so it is taken where it will do
        zeros = np.minimum(np.maximum(middle, -lowest), 2 * middle - 1 - highest)
        multiples += zeros
        found.levels[part] = multiples.reshape(-1, *found.levels.shape[1:])
        found.scales[part], found.zeros[part] = steps.reshape(-1, shape[1]), zeros.reshape(-1, shape[1])
    return found if on_levels >= _ENOUGH * found.scales.size else None


def _rounding(numbers: Floats) -> float:
    """The share by which these numbers may have been rounded when they were stored, by the bits that they have."""
    if not (numbers.view(np.uint32) & 0xFFFF).any():
        return 2**-9  # bf16
    with np.errstate(over="ignore"):
        return 2**-12 if np.array_equal(numbers.astype(np.float16), numbers) else 2**-24


def _steps(blocks: Floats, noise: float, count: int) -> tuple[Floats, Floats, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Blocks [B,b] -> steps [B,1], their multiples that the numbers are [B,b], and whether they are, and at most `count`: [B].

    Where they are not, step and multiples are those of rounding to nearest.
    """
    largest = np.abs(blocks).max(1, keepdims=True)
    with np.errstate(all="ignore"):  # what is no number lies on no level
        step = _common_step(blocks, noise, largest / (2 * count))
        multiples = np.rint(blocks / step)
        step = (np.einsum("ij,ij->i", blocks, multiples) / np.einsum("ij,ij->i", multiples, multiples))[:, None]  # least squares
        step[largest == 0] = 1
        multiples[largest[:, 0] == 0] = 0
        off = np.abs(blocks / step - multiples).max(1)
        span = np.maximum(multiples.max(1), 0) - np.minimum(multiples.min(1), 0)
        fits = (off <= noise) & (span < count)
        others = ~fits
        step[others] = largest[others] / (count // 2 - 1)
        multiples[others] = np.rint(blocks[others] / step[others])
    return step, multiples, fits


def _common_step(blocks: Floats, noise: float, least: Floats) -> Floats:
    """The largest number of which all of a block, and 0, are multiples: [B,1]. What is nearer than `least` is the same."""
    ordered = np.sort(np.pad(blocks, ((0, 0), (0, 1))), axis=1)
    gaps = np.diff(ordered, axis=1)
    gaps[gaps < least] = np.inf
    step = _mean_of_single(gaps, gaps.min(1, keepdims=True), noise)
    going = np.arange(len(blocks))
    for _ in range(_ROUNDS):
        rest = np.abs(gaps[going] - step[going] * np.rint(gaps[going] / step[going]))
        rest[~(rest > 2 * noise * step[going])] = np.inf
        going, rest = going[np.isfinite(rest).any(1)], rest[np.isfinite(rest).any(1)]
        if not len(going):
            break
        step[going] = _mean_of_single(gaps[going], rest.min(1, keepdims=True), noise)
    return step


def _mean_of_single(gaps: Floats, step: Floats, noise: float) -> Floats:
    """The step again from all gaps of one, which evens out their noise; as it is where there are none."""
    single = gaps < (1 + 3 * noise) * step
    mean: Floats = np.where(single, gaps, 0).sum(1, keepdims=True) / single.sum(1, keepdims=True)
    return np.where(single.any(1, keepdims=True), mean, step)
