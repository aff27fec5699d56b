"""Recover the levels of weights whose checkpoint was quantised, so that quantising them again in other blocks is exact.

Rounding such weights again picks other levels, because a block's largest number decides on them, and so loses what GPTQ, AWQ or
training gained. Normally distributed weights in 4 bits and groups of 128 are 0.10 to 0.11 off (relative norm), and 0.12 to 0.14
after another `rtn` in blocks of 32.

The levels are found in the numbers, not passed on from the checkpoint, because by then matrices have been joined, transposed and
reordered. A block's step is the largest number of which all its numbers are multiples (Euclid's algorithm). There is one where
the block lies within one group of the checkpoint. Rows may differ, because some of the matrices that were joined may be quantised
and others not (recipes that leave values in 16 bits).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Mask = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

_EXACT_TOLERANCE = 1e-3  # steps that a number may be off its level where level * scale was not rounded to a narrow type
# shares that must fit: of all blocks (a few whose step is not found, numbers too far apart, are rounded to nearest), or, where
# other rows do not fit, of a row's blocks (no block fits by chance)
_MIN_FITTING_SHARE = 0.9
_MIN_FITTING_SHARE_OF_ROW = 0.5
_SAMPLED_ROWS, _SAMPLED_BLOCKS = 32, 64  # rows of a matrix, and blocks of each of those rows
_MAX_ROUNDS = 8  # of Euclid's algorithm
_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """In the rows that lie on levels the weight is (levels - zeros) * scales."""

    rows: Mask  # [N], those that lie on levels
    levels: Bytes  # [N, K / block, block]
    scales: Floats  # [N, K / block]
    zeros: Bytes  # [N, K / block]


def kept_levels(weight: Floats, bits: int, block: int) -> Levels | None:
    """The rows of a matrix [N,K] that lie on at most 2 ** `bits` levels in each block of inputs, 0 among them; None: no rows."""
    rows, columns = weight.shape
    sample = weight[:: max(1, rows // _SAMPLED_ROWS), : _SAMPLED_BLOCKS * block].reshape(-1, block)
    tolerances = [
        _EXACT_TOLERANCE,
        *(wide for wide in [2 * _rounding_error(sample) * (1 << bits)] if _EXACT_TOLERANCE < wide < 0.25),
    ]
    shape = (rows, columns // block)

    def num_rows_on_levels(tolerance: float) -> int:
        _, multiples, fits = _find_steps(sample, tolerance, 1 << bits)
        blocks = min(shape[1], _SAMPLED_BLOCKS)
        return int(_rows_on_levels(fits.reshape(-1, blocks), multiples.any(1).reshape(-1, blocks)).sum())

    num_rows, tolerance = max(((num_rows_on_levels(tolerance), tolerance) for tolerance in tolerances), key=lambda each: each[0])
    if not num_rows:  # most matrices end here, at the cost of a sample
        return None
    levels, scales, zeros = np.empty((*shape, block), np.uint8), np.empty(shape, np.float32), np.empty(shape, np.uint8)
    fitting, nonzero = np.empty(shape, np.bool_), np.empty(shape, np.bool_)
    for start in range(0, rows, _ROWS_AT_A_TIME):
        part = slice(start, start + _ROWS_AT_A_TIME)
        steps, multiples, fits = _find_steps(weight[part].reshape(-1, block), tolerance, 1 << bits)
        fitting[part], nonzero[part] = fits.reshape(-1, shape[1]), multiples.any(1).reshape(-1, shape[1])
        lowest, highest = multiples.min(1, keepdims=True), multiples.max(1, keepdims=True)
        middle = (1 << bits) // 2  # the zero point that need not be stored, so the offset is as close to it as the levels allow
        offsets = np.minimum(np.maximum(middle, -lowest), 2 * middle - 1 - highest)
        multiples += offsets
        levels[part] = multiples.reshape(-1, *levels.shape[1:])
        scales[part], zeros[part] = steps.reshape(-1, shape[1]), offsets.reshape(-1, shape[1])
    kept = _rows_on_levels(fitting, nonzero)
    return Levels(rows=kept, levels=levels, scales=scales, zeros=zeros) if kept.any() else None


def _rows_on_levels(fits: Mask, nonzero: Mask) -> Mask:
    """Which rows lie on levels [N].

    Args:
        fits: [N, K / block], whether the block's step was found.
        nonzero: [N, K / block], whether the block has any number but 0.
    """
    if fits.mean() >= _MIN_FITTING_SHARE:
        return np.ones(len(fits), np.bool_)
    mask: Mask = (fits & nonzero).sum(1) >= np.maximum(1, _MIN_FITTING_SHARE_OF_ROW * nonzero.sum(1))
    return mask


def _rounding_error(numbers: Floats) -> float:
    """The relative rounding error of the narrowest float type that holds these numbers."""
    if not (numbers.view(np.uint32) & 0xFFFF).any():
        return 2**-9  # bf16
    with np.errstate(over="ignore"):
        return 2**-12 if np.array_equal(numbers.astype(np.float16), numbers) else 2**-24


def _find_steps(blocks: Floats, tolerance: float, num_levels: int) -> tuple[Floats, Floats, Mask]:
    """Blocks [n,b] -> each block's step [n,1], its numbers as multiples of the step [n,b], and whether the block fits [n].

    A block fits where its numbers are multiples of one step and span at most `num_levels` levels, 0 among them. Where it does
    not, step and multiples are those of rounding to nearest.

    Args:
        tolerance: steps that a number half of all levels from 0 may be off its multiple.
    """
    largest = np.abs(blocks).max(1, keepdims=True)
    with np.errstate(all="ignore"):  # NaN and infinite numbers do not fit
        step = _common_step(blocks, tolerance, largest / (2 * num_levels))
        multiples = np.rint(blocks / step)
        step = (np.einsum("ij,ij->i", blocks, multiples) / np.einsum("ij,ij->i", multiples, multiples))[:, None]  # least squares
        step[largest == 0] = 1
        multiples[largest[:, 0] == 0] = 0
        error = np.abs(blocks / step - multiples).max(1)
        span = np.maximum(multiples.max(1), 0) - np.minimum(multiples.min(1), 0)
        # rounding is relative: a block whose multiples are small may only be off by a small part of `tolerance`
        relative_magnitude = np.minimum(1, np.abs(multiples).max(1) / (num_levels // 2))
        fits = (error <= np.maximum(_EXACT_TOLERANCE, tolerance * relative_magnitude)) & (span < num_levels)
        unfit = ~fits
        step[unfit] = largest[unfit] / (num_levels // 2 - 1)
        multiples[unfit] = np.rint(blocks[unfit] / step[unfit])
    return step, multiples, fits


def _common_step(blocks: Floats, tolerance: float, min_gap: Floats) -> Floats:
    """The largest step [n,1] of which all numbers of a block [n,b] are multiples. Numbers closer than `min_gap` are equal."""
    ordered = np.sort(np.pad(blocks, ((0, 0), (0, 1))), axis=1)
    gaps = np.diff(ordered, axis=1)
    gaps[gaps < min_gap] = np.inf
    step = _mean_single_gap(gaps, gaps.min(1, keepdims=True), tolerance)
    unfinished = np.arange(len(blocks))
    for _ in range(_MAX_ROUNDS):
        rest = np.abs(gaps[unfinished] - step[unfinished] * np.rint(gaps[unfinished] / step[unfinished]))
        rest[~(rest > 2 * tolerance * step[unfinished])] = np.inf
        unfinished, rest = unfinished[np.isfinite(rest).any(1)], rest[np.isfinite(rest).any(1)]
        if not len(unfinished):
            break
        step[unfinished] = _mean_single_gap(gaps[unfinished], rest.min(1, keepdims=True), tolerance)
    return step


def _mean_single_gap(gaps: Floats, step: Floats, tolerance: float) -> Floats:
    """The mean of all gaps of a single step, which evens out their noise; `step` itself where there are none."""
    single = gaps < (1 + 3 * tolerance) * step
    mean: Floats = np.where(single, gaps, 0).sum(1, keepdims=True) / single.sum(1, keepdims=True)
    return np.where(single.any(1, keepdims=True), mean, step)
