"""Quantise weights block by block with ONNX Runtime's own quantisers.

Methods: `rtn` rounds to nearest, symmetric. `k-quant` (llama.cpp's, as ONNX Runtime ships it) searches each block's scale and
zero point for the least squared error, in which large weights count more. Weights of a quantised checkpoint keep their levels.

This module does not import onnx_ir, so that `skip-export --help` and a rejected option take 0.35 s instead of 0.93 s (AMD EPYC).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skipdecode.graph_passes.kept_levels import Bytes, Floats, Levels, kept_levels

Parts = dict[str, np.ndarray[Any, np.dtype[Any]]]  # the operator's inputs after the first, in order

BLOCK_SIZES = (32, 64, 128)  # those that ONNX Runtime's CPU kernels multiply in int8
_ROWS_AT_A_TIME = 256  # their transposed copy suits the CPU's caches: 64 Mi numbers take 0.49 s, with 1024 rows 0.63 s (AVX-512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How weights are quantised."""

    bits: int  # 4 or 8
    block_size: int = 32  # inputs that share one scale, one of BLOCK_SIZES; int8 plans have one scale per output instead
    method: str = "rtn"  # a name of METHODS
    outer_bits: int | None = None  # bits of embedding and head; None: same as `bits`

    @property
    def name(self) -> str:
        """The name in manifests, such as `int4`."""
        return f"int{self.bits}"

    @property
    def outer(self) -> Quantization:
        """How embedding and head are quantised."""
        return replace(self, bits=self.outer_bits or self.bits, outer_bits=None)

    def quantise(self, weight: Floats) -> Parts:
        """Quantise a matrix [N,K] to the operator's inputs. Rows that lie on levels already keep them."""
        kept = kept_levels(weight, self.bits, self.block_size)
        if kept is None or not kept.rows.all():
            rounded = METHODS[self.method](weight, self.bits, self.block_size)
            return rounded if kept is None else self._merged(rounded, kept)
        return _parts_of_levels(kept, self.bits)

    def _merged(self, rounded: Parts, kept: Levels) -> Parts:
        kept_parts = _parts_of_levels(kept, self.bits)
        if "zero_points" in kept_parts or "zero_points" in rounded:
            kept_parts, rounded = self.with_zero_points(kept_parts), self.with_zero_points(rounded)
        merged = {}
        for name, numbers in rounded.items():
            rounded_numbers, kept_numbers = (part.reshape(len(kept.rows), -1) for part in (numbers, kept_parts[name]))
            merged[name] = np.where(kept.rows[:, None], kept_numbers, rounded_numbers).reshape(numbers.shape)
        return merged

    def with_zero_points(self, parts: Parts) -> Parts:
        """The same matrix with explicit zero points, where the operator's default (the middle level) was implied."""
        outputs, blocks, *_ = parts["weight"].shape
        return parts if "zero_points" in parts else parts | middle_zero_points(outputs, blocks, self.bits)


def _round_to_nearest(weight: Floats, bits: int, block: int) -> Parts:
    """Quantise a matrix [N,K] to blocks [N, K / block, block * bits / 8] and their scales [N * K / block].

    Works on some rows at a time: the quantiser needs a transposed copy and handles at most 2**31 numbers (Gemma 4's per-layer
    inputs have more).
    """
    null_handler = logging.NullHandler()  # without a handler, importing the quantiser sets the root logger to INFO
    logging.getLogger().addHandler(null_handler)
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

    logging.getLogger().removeHandler(null_handler)
    config = DefaultWeightOnlyQuantConfig(block_size=block, is_symmetric=True, accuracy_level=4, bits=bits)
    quantizer, packed, scales = DefaultWeightOnlyQuantizer(config), [], []
    for start in range(0, len(weight), _ROWS_AT_A_TIME):
        levels, scale, _ = quantizer.qbits_block_quant(np.ascontiguousarray(weight[start : start + _ROWS_AT_A_TIME].T))
        packed.append(levels)
        scales.append(scale.reshape(-1))
    return {"weight": np.concatenate(packed), "scales": np.concatenate(scales)}


def _k_quant(weight: Floats, bits: int, block: int) -> Parts:
    """Like `_round_to_nearest`, with zero points [N, ceil(K / block * bits / 8)]. The search takes 10x its rows' memory."""
    from onnxruntime.quantization.neural_compressor.weight_only import quant_tensor_k_quant_cpu

    outputs, inputs = weight.shape
    packed, scales, zeros = [], [], []
    for start in range(0, outputs, _ROWS_AT_A_TIME):
        rows = np.ascontiguousarray(weight[start : start + _ROWS_AT_A_TIME])
        with np.errstate(invalid="ignore"):  # 0 / 0 in blocks of zeros: an embedding's padding tokens
            levels, scale, zero = quant_tensor_k_quant_cpu(rows, bits, block)
        levels, scale, zero = _requantise_one_signed_blocks(rows.reshape(-1, block), bits, levels.reshape(-1, block), scale, zero)
        packed.append(_pack_levels(levels.astype(np.uint8).reshape(-1, block), bits).reshape(len(rows), inputs // block, -1))
        scales.append(scale.astype(np.float32).reshape(-1))
        zeros.append(_pack_levels(zero.reshape(len(rows), inputs // block), bits))
    return {"weight": np.concatenate(packed), "scales": np.concatenate(scales), "zero_points": np.concatenate(zeros)}


def _requantise_one_signed_blocks(blocks: Floats, bits: int, levels: Any, scale: Any, zero: Any) -> tuple[Any, Any, Any]:
    """Redo blocks whose numbers share a sign: round to nearest, with levels spanning 0 to the number of largest magnitude.

    The search starts their levels at the smallest number, which no zero point of the operator can express: 0.015 .. 0.02 came out
    74 % off.

    Args:
        blocks: B blocks of b numbers, [B,b]; `levels`, `scale` and `zero` are what the search found for them.
    """
    is_one_signed, highest = (blocks.min(1) > 0) | (blocks.max(1) < 0), (1 << bits) - 1
    steps = np.abs(blocks[is_one_signed]).max(1, keepdims=True) / highest
    zeros = np.where(blocks[is_one_signed, :1] < 0, highest, 0)
    levels, scale, zero = levels.copy(), scale.reshape(-1, 1).copy(), zero.reshape(-1, 1).copy()
    levels[is_one_signed] = np.clip(np.rint(blocks[is_one_signed] / steps) + zeros, 0, highest)
    scale[is_one_signed], zero[is_one_signed] = steps, zeros
    return levels, scale, zero


METHODS: dict[str, Callable[[Floats, int, int], Parts]] = {"rtn": _round_to_nearest, "k-quant": _k_quant}


def _parts_of_levels(kept: Levels, bits: int) -> Parts:
    parts: Parts = {"weight": _pack_levels(kept.levels, bits), "scales": kept.scales.reshape(-1)}
    return parts if (kept.zeros == 1 << (bits - 1)).all() else parts | {"zero_points": _pack_levels(kept.zeros, bits)}


def middle_zero_points(outputs: int, blocks: int, bits: int) -> Parts:
    """The operator's default zero points, the middle level, written out: [N, ceil(K / block * bits / 8)]."""
    return {"zero_points": _pack_levels(np.full((outputs, blocks), 1 << (bits - 1), np.uint8), bits)}


def _pack_levels(levels: Bytes, bits: int) -> Bytes:
    """Pack 4-bit levels along the last axis, two per byte, the first in the low half; 8-bit levels stay as they are."""
    if bits == 8:
        return levels
    even = np.pad(levels, [(0, 0)] * (levels.ndim - 1) + [(0, levels.shape[-1] % 2)])
    packed: Bytes = np.bitwise_or(even[..., 0::2], np.left_shift(even[..., 1::2], np.uint8(4)))
    return packed
