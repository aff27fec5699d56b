"""Whether the levels of a quantised checkpoint are recovered from its matrices."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipdecode.graph_passes.kept_levels import Floats, Levels, kept_levels
from skipdecode.graph_passes.quantization import METHODS, Quantization
from tests.graph_passes.running import quantised, relative_error

ROWS, INPUTS = 40, 256


def stored(
    bits: int, group: int, *, symmetric: bool, seed: int = 0, scale: type = np.float16, rows: int = ROWS, inputs: int = INPUTS
) -> Floats:
    """A normal matrix rounded as GPTQ and AWQ store it: levels, and for each group of inputs a scale and a zero point."""
    drawn = np.random.default_rng(seed).standard_normal((rows, inputs // group, group)) * 0.02
    if symmetric:
        scales = np.abs(drawn).max(2, keepdims=True) / ((1 << bits) / 2 - 0.5)
        zeros = np.full_like(scales, 1 << (bits - 1))
    else:
        drawn += 0.01 * np.random.default_rng(seed + 1).standard_normal((rows, inputs // group, 1))
        lowest = np.minimum(drawn.min(2, keepdims=True), 0)
        scales = (np.maximum(drawn.max(2, keepdims=True), 0) - lowest) / ((1 << bits) - 1)
        zeros = np.rint(-lowest / scales)
    scales = scales.astype(scale).astype(np.float32)
    levels = np.clip(np.rint(drawn / scales) + zeros, 0, (1 << bits) - 1)
    weight: Floats = ((levels - zeros) * scales).astype(np.float32).reshape(rows, inputs)
    return weight


def restored(found: Levels | None) -> Floats:
    assert found is not None
    weight: Floats = (found.levels.astype(np.float32) - found.zeros[..., None]) * found.scales[..., None]
    return weight.reshape(len(weight), -1)


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize(
    ("bits", "symmetric", "scale"),
    [
        (4, True, np.float16),
        (4, False, np.float16),
        (4, False, np.float32),
        (8, True, ml_dtypes.bfloat16),
        (2, False, np.float16),
    ],
)
def test_levels_are_recovered_exactly(bits: int, symmetric: bool, scale: type, block: int) -> None:
    weight = stored(bits, 128, symmetric=symmetric, scale=scale)
    found = kept_levels(weight, max(bits, 4), block)
    assert relative_error(restored(found), weight) < 1e-6
    assert found is not None and (found.zeros == 1 << (max(bits, 4) - 1)).all() == (symmetric or bits == 2)


def test_4_bit_levels_stored_in_8_bits_need_no_zero_point() -> None:
    weight = stored(4, 128, symmetric=False)
    found = kept_levels(weight, 8, 32)
    assert found is not None and (found.zeros == 128).all()
    assert relative_error(restored(found), weight) < 1e-6


def test_mxfp4_numbers_are_8_bit_levels_but_not_4_bit_ones() -> None:
    rng = np.random.default_rng(0)
    numbers = rng.choice([0, 0.5, 1, 1.5, 2, 3, 4, 6], (ROWS, INPUTS // 32, 32)) * rng.choice([-1, 1], (ROWS, INPUTS // 32, 32))
    weight = (numbers * 2.0 ** rng.integers(-6, -2, (ROWS, INPUTS // 32, 1))).astype(np.float32).reshape(ROWS, INPUTS)
    assert relative_error(restored(kept_levels(weight, 8, 32)), weight) == 0
    assert kept_levels(weight, 4, 32) is None


@pytest.mark.parametrize(("dtype", "rounding"), [(np.float16, 2e-4), (ml_dtypes.bfloat16, 2e-3)])
def test_levels_stored_in_a_narrow_dtype_are_recovered_within_its_rounding(dtype: type, rounding: float) -> None:
    weight = stored(4, 128, symmetric=False)
    narrow = weight.astype(dtype).astype(np.float32)
    assert relative_error(restored(kept_levels(narrow, 4, 32)), weight) < rounding


def _far_from_zero() -> Floats:
    """Blocks of one sign, whose zero lies below all 16 levels."""
    levels = np.random.default_rng(0).integers(5, 19, (ROWS, INPUTS))
    levels[:, ::32], levels[:, 1::32] = 5, 18
    return (levels * 0.01).astype(np.float32)


@pytest.mark.parametrize(
    "weight",
    [
        np.random.default_rng(0).standard_normal((ROWS, INPUTS)).astype(np.float32),
        np.random.default_rng(0).standard_normal((ROWS, INPUTS)).astype(ml_dtypes.bfloat16).astype(np.float32),
        np.full((ROWS, INPUTS), np.nan, np.float32),
        np.full((ROWS, INPUTS), np.inf, np.float32),
        _far_from_zero(),
        stored(8, 128, symmetric=True),  # too many for 4 bits
        stored(4, 16, symmetric=True),  # two groups per block
        stored(4, 128, symmetric=True)[:, np.random.default_rng(0).permutation(INPUTS)],  # groups in activation order
    ],
    ids=["normal", "normal in bf16", "nan", "infinite", "far from zero", "8 bits", "smaller groups", "inputs in another order"],
)
def test_weights_on_no_levels_are_left_to_rounding(weight: Floats) -> None:
    assert kept_levels(weight, 4, 32) is None


@pytest.mark.parametrize("bits", [4, 8])
def test_neither_blocks_of_zeros_nor_bf16s_coarse_numbers_are_taken_for_levels(bits: int) -> None:
    """Half a level of 8 bits is finer than bf16, whose rounding would excuse any number."""
    weight = np.random.default_rng(0).standard_normal((64, INPUTS)).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert kept_levels(weight, bits, 32) is None
    weight.reshape(64, -1, 32)[:, ::2] = 0
    assert kept_levels(weight, bits, 32) is None


@pytest.mark.parametrize(("zeros", "block"), [(0.9, 32), (0.95, 32), (0.95, 64), (0.98, 64)])
def test_a_few_fp16_numbers_are_not_mistaken_for_levels(zeros: float, block: int) -> None:
    """Pruning leaves few numbers in a block: with a step as large as the largest, an eighth of it must not pass for noise."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((256, 1024)) * (rng.random((256, 1024)) > zeros)
    weight = weight.astype(np.float16).astype(np.float32)
    found = kept_levels(weight, 8, block)
    rows = np.zeros(256, np.bool_) if found is None else found.rows
    largest = np.abs(weight.reshape(256, -1, block)).max(2)[rows].max(initial=0)
    off = 0.0 if found is None else np.abs(restored(found) - weight)[rows].max(initial=0)
    assert off <= largest / 254, "no further off than rounding to nearest"


def test_a_few_blocks_on_no_levels_are_rounded_and_the_others_keep_theirs() -> None:
    weight = stored(4, 128, symmetric=True)
    weight[3, 32:64] = drawn = np.random.default_rng(5).standard_normal(32).astype(np.float32)
    found = restored(kept_levels(weight, 4, 32))
    assert np.abs(found[3, 32:64] - drawn).max() <= np.abs(drawn).max() / 7 / 2 * 1.001
    found[3, 32:64] = weight[3, 32:64]
    assert relative_error(found, weight) < 1e-6


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_of_joined_matrices_those_with_levels_keep_them(method: str, symmetric: bool) -> None:
    """Like query, key and value of a checkpoint that leaves values in 16 bits."""
    query = stored(4, 128, symmetric=symmetric)
    value = np.random.default_rng(0).standard_normal((ROWS // 4, INPUTS)).astype(np.float32) * 0.02
    found = kept_levels(np.concatenate([query, value]), 4, 32)
    assert found is not None and found.rows.tolist() == ROWS * [True] + len(value) * [False]
    how = Quantization(bits=4, method=method)
    joined, alone = quantised(np.concatenate([query, value]), how), quantised(value, how)
    assert relative_error(joined[:ROWS], query) < 1e-6
    np.testing.assert_array_equal(joined[ROWS:], alone)


def test_zeros_stay_zeros() -> None:
    weight = stored(4, 128, symmetric=True)
    weight[::3] = 0
    assert relative_error(restored(kept_levels(weight, 4, 32)), weight) < 1e-6
    assert not restored(kept_levels(np.zeros((8, 64), np.float32), 4, 32)).any()


@given(
    seed=st.integers(0, 2**32), bits=st.sampled_from([4, 8]), group=st.sampled_from([32, 64, 128]), symmetric=st.booleans(),
    scale=st.sampled_from([np.float16, np.float32, ml_dtypes.bfloat16]),
)  # fmt: skip
def test_any_stored_matrix_is_recovered(seed: int, bits: int, group: int, symmetric: bool, scale: type) -> None:
    weight = stored(bits, group, symmetric=symmetric, seed=seed, scale=scale)
    assert relative_error(restored(kept_levels(weight, bits, 32)), weight) < (1e-6 if bits == 4 else 1e-3)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_the_operator_multiplies_by_the_checkpoints_own_levels(method: str, symmetric: bool) -> None:
    weight = stored(4, 128, symmetric=symmetric)
    assert relative_error(quantised(weight, Quantization(bits=4, method=method)), weight) < 1e-6
