"""Weights that lie on levels already, because their checkpoint was quantised, in the blocks of `QuantizeWeightsPass`, exactly.

Rounding them anew takes other levels (a block's largest number decides on them), and so loses what GPTQ, AWQ or training have
won: normal weights in 4 bits and groups of 128 are 0.10 to 0.11 off (relative norm), after `rtn` in blocks of 32 0.12 to 0.14.

The levels are found in the numbers, not handed over: by then matrices are joined, turned and put in another order. A block's step
is the largest number of which all its numbers are multiples (Euclid's algorithm), as they are where the block lies in one group.
Of matrices that were joined some may be quantised and others not (recipes that leave values in 16 bits), so rows differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Mask = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

_EXACT = 1e-3  # steps that a number may be off, where it is what scale and level gave
_ENOUGH = 0.9  # of all blocks; the few whose step is not found, because their numbers are too far apart, are rounded to nearest
_ENOUGH_OF_A_ROW = 0.5  # where others lie on none: by chance no block does
_SAMPLED_ROWS, _SAMPLED_BLOCKS = 32, 64  # of each of those rows
_ROUNDS = 8  # of Euclid's algorithm
_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """(levels - zeros) * scales is the weight, in the rows that lie on levels."""

    rows: Mask  # [N]
    levels: Bytes  # [N, K / block, block]
    scales: Floats  # [N, K / block]
    zeros: Bytes  # [N, K / block]


def kept_levels(weight: Floats, bits: int, block: int) -> Levels | None:
    """Of a matrix [N,K] the rows that lie on at most 2 ** `bits` levels in each block of inputs, 0 among them; None: none."""
    rows, columns = weight.shape
    sample = weight[:: max(1, rows // _SAMPLED_ROWS), : _SAMPLED_BLOCKS * block].reshape(-1, block)
    allowed = [_EXACT, *(noise for noise in [2 * _rounding(sample) * (1 << bits)] if _EXACT < noise < 0.25)]
    shape = (rows, columns // block)

    def on_levels(noise: float) -> int:
        _, multiples, fits = _steps(sample, noise, 1 << bits)
        blocks = min(shape[1], _SAMPLED_BLOCKS)
        return int(_rows_on_levels(fits.reshape(-1, blocks), multiples.any(1).reshape(-1, blocks)).sum())

    found, noise = max(((on_levels(noise), noise) for noise in allowed), key=lambda each: each[0])
    if not found:  # most matrices: no time is lost with them
        return None
    levels, scales, zeros = np.empty((*shape, block), np.uint8), np.empty(shape, np.float32), np.empty(shape, np.uint8)
    fitting, used = np.empty(shape, np.bool_), np.empty(shape, np.bool_)
    for start in range(0, rows, _ROWS_AT_A_TIME):
        part = slice(start, start + _ROWS_AT_A_TIME)
        steps, multiples, fits = _steps(weight[part].reshape(-1, block), noise, 1 << bits)
        fitting[part], used[part] = fits.reshape(-1, shape[1]), multiples.any(1).reshape(-1, shape[1])
        lowest, highest = multiples.min(1, keepdims=True), multiples.max(1, keepdims=True)
        middle = (1 << bits) // 2  # a zero point that need not be stored, so it is taken where it will do
        offsets = np.minimum(np.maximum(middle, -lowest), 2 * middle - 1 - highest)
        multiples += offsets
        levels[part] = multiples.reshape(-1, *levels.shape[1:])
        scales[part], zeros[part] = steps.reshape(-1, shape[1]), offsets.reshape(-1, shape[1])
    kept = _rows_on_levels(fitting, used)
    return Levels(rows=kept, levels=levels, scales=scales, zeros=zeros) if kept.any() else None


def _rows_on_levels(fits: Mask, used: Mask) -> Mask:
    """Of each block [N, K / block] whether its step was found, and whether it has other numbers than 0 -> [N]."""
    if fits.mean() >= _ENOUGH:
        return np.ones(len(fits), np.bool_)
    mask: Mask = (fits & used).sum(1) >= np.maximum(1, _ENOUGH_OF_A_ROW * used.sum(1))
    return mask


def _rounding(numbers: Floats) -> float:
    """The share by which these numbers may have been rounded when they were stored, by the bits that they have."""
    if not (numbers.view(np.uint32) & 0xFFFF).any():
        return 2**-9  # bf16
    with np.errstate(over="ignore"):
        return 2**-12 if np.array_equal(numbers.astype(np.float16), numbers) else 2**-24


def _steps(blocks: Floats, noise: float, count: int) -> tuple[Floats, Floats, Mask]:
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
        # numbers are rounded by a share of themselves, so of few steps only by few of the noise that half of all levels may have
        few = np.minimum(1, np.abs(multiples).max(1) / (count // 2))
        fits = (off <= np.maximum(_EXACT, noise * few)) & (span < count)
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
