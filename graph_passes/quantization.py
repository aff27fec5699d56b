"""What quantised weights are, block by block, made by ONNX Runtime's own quantisers.

Methods: `rtn` rounds to nearest, symmetric; `k-quant` searches each block's scale and zero point for the least squared error,
large weights counting more (llama.cpp's, as ONNX Runtime ships it). Weights of a quantised checkpoint keep their levels.

Without onnx_ir, so that `skip-export --help` and what refuses an option take 0.35 s, where they took 0.93 (AMD EPYC).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skipdecode.graph_passes.kept_levels import Bytes, Floats, Levels, kept_levels

Parts = dict[str, np.ndarray[Any, np.dtype[Any]]]  # the operator's inputs after the first, in order

BLOCK_SIZES = (32, 64, 128)  # that ONNX Runtime's CPU kernels multiply in int8
_ROWS_AT_A_TIME = 256  # whose turned copy a cache holds better than 1024: 0.49 s for 64 Mi numbers, not 0.63 (AVX-512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How weights are quantised."""

    bits: int  # 4 or 8
    block_size: int = 32  # inputs that share one scale, one of BLOCK_SIZES; plans in int8 have one scale an output
    method: str = "rtn"  # a name of METHODS
    outer_bits: int | None = None  # of embedding and head; None: the same

    @property
    def name(self) -> str:
        """`int4`, as manifests say it."""
        return f"int{self.bits}"

    @property
    def outer(self) -> Quantization:
        """What embedding and head are."""
        return replace(self, bits=self.outer_bits or self.bits, outer_bits=None)

    def parts(self, weight: Floats) -> Parts:
        """A matrix [N, K] to what the operator takes of it; rows that lie on levels already keep them."""
        kept = kept_levels(weight, self.bits, self.block_size)
        if kept is None or not kept.rows.all():
            rounded = METHODS[self.method](weight, self.bits, self.block_size)
            return rounded if kept is None else self._merged(rounded, kept)
        return _packed(kept, self.bits)

    def _merged(self, rounded: Parts, kept: Levels) -> Parts:
        own = _packed(kept, self.bits)
        if "zero_points" in own or "zero_points" in rounded:
            own, rounded = self.with_zero_points(own), self.with_zero_points(rounded)
        merged = {}
        for name, numbers in rounded.items():
            by_row, theirs = (part.reshape(len(kept.rows), -1) for part in (numbers, own[name]))
            merged[name] = np.where(kept.rows[:, None], theirs, by_row).reshape(numbers.shape)
        return merged

    def with_zero_points(self, parts: Parts) -> Parts:
        """The same matrix, its zero points written out where they are in the middle of the levels."""
        outputs, blocks, *_ = parts["weight"].shape
        return parts if "zero_points" in parts else parts | middle_zero_points(outputs, blocks, self.bits)


def _round_to_nearest(weight: Floats, bits: int, block: int) -> Parts:
    """A matrix [N, K] to blocks [N, K / block, block * bits / 8] and their scales [N * K / block].

    Some rows at a time: the quantiser wants a copy turned, and counts no more than 2**31 numbers (Gemma 4's per-layer inputs).
    """
    guard = logging.NullHandler()  # importing the quantiser would switch on everybody's INFO messages
    logging.getLogger().addHandler(guard)
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

    logging.getLogger().removeHandler(guard)
    config = DefaultWeightOnlyQuantConfig(block_size=block, is_symmetric=True, accuracy_level=4, bits=bits)
    quantizer, packed, scales = DefaultWeightOnlyQuantizer(config), [], []
    for start in range(0, len(weight), _ROWS_AT_A_TIME):
        levels, scale, _ = quantizer.qbits_block_quant(np.ascontiguousarray(weight[start : start + _ROWS_AT_A_TIME].T))
        packed.append(levels)
        scales.append(scale.reshape(-1))
    return {"weight": np.concatenate(packed), "scales": np.concatenate(scales)}


def _k_quant(weight: Floats, bits: int, block: int) -> Parts:
    """As above, with zero points [N, ceil(K / block * bits / 8)]; some rows at a time: the search takes 10x their memory."""
    from onnxruntime.quantization.neural_compressor.weight_only import quant_tensor_k_quant_cpu

    outputs, inputs = weight.shape
    packed, scales, zeros = [], [], []
    for start in range(0, outputs, _ROWS_AT_A_TIME):
        rows = np.ascontiguousarray(weight[start : start + _ROWS_AT_A_TIME])
        with np.errstate(invalid="ignore"):  # of a block of zeros, as padding tokens have in an embedding, its search says so
            levels, scale, zero = quant_tensor_k_quant_cpu(rows, bits, block)
        levels, scale, zero = _begun_at_zero(rows.reshape(-1, block), bits, levels.reshape(-1, block), scale, zero)
        packed.append(_nibbles(levels.astype(np.uint8).reshape(-1, block), bits).reshape(len(rows), inputs // block, -1))
        scales.append(scale.astype(np.float32).reshape(-1))
        zeros.append(_nibbles(zero.reshape(len(rows), inputs // block), bits))
    return {"weight": np.concatenate(packed), "scales": np.concatenate(scales), "zero_points": np.concatenate(zeros)}


def _begun_at_zero(blocks: Floats, bits: int, levels: Any, scale: Any, zero: Any) -> tuple[Any, Any, Any]:
    """Blocks [B,b] and what was found of them, but blocks of one sign rounded to nearest between 0 and their largest number.

    The search lets their levels begin at their least number, for which the operator has no zero point: 0.015 .. 0.02 came out
    74 % off.
    """
    one_sign, most = (blocks.min(1) > 0) | (blocks.max(1) < 0), (1 << bits) - 1
    steps = np.abs(blocks[one_sign]).max(1, keepdims=True) / most
    zeros = np.where(blocks[one_sign, :1] < 0, most, 0)
    levels, scale, zero = levels.copy(), scale.reshape(-1, 1).copy(), zero.reshape(-1, 1).copy()
    levels[one_sign] = np.clip(np.rint(blocks[one_sign] / steps) + zeros, 0, most)
    scale[one_sign], zero[one_sign] = steps, zeros
    return levels, scale, zero


METHODS: dict[str, Callable[[Floats, int, int], Parts]] = {"rtn": _round_to_nearest, "k-quant": _k_quant}


def _packed(kept: Levels, bits: int) -> Parts:
    parts: Parts = {"weight": _nibbles(kept.levels, bits), "scales": kept.scales.reshape(-1)}
    return parts if (kept.zeros == 1 << (bits - 1)).all() else parts | {"zero_points": _nibbles(kept.zeros, bits)}


def middle_zero_points(outputs: int, blocks: int, bits: int) -> Parts:
    """In the middle of the levels, where the operator has them if they are not given: [N, ceil(K / block * bits / 8)]."""
    return {"zero_points": _nibbles(np.full((outputs, blocks), 1 << (bits - 1), np.uint8), bits)}


def _nibbles(levels: Bytes, bits: int) -> Bytes:
    """Two levels a byte, the lower one first, along the last axis; levels of 8 bits as they are."""
    if bits == 8:
        return levels
    even = np.pad(levels, [(0, 0)] * (levels.ndim - 1) + [(0, levels.shape[-1] % 2)])
    packed: Bytes = np.bitwise_or(even[..., 0::2], np.left_shift(even[..., 1::2], np.uint8(4)))
    return packed
