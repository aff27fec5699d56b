"""Fuse a rotary embedding of a narrow graph into one operator; its tables are cast from fp32, which hides it from clean_trace.

    x * Cast(Cos(f)) + rotate_half(x) * Cast(Sin(f))
    -> RotaryEmbedding(x, Cast(Cos(f)), Cast(Sin(f)))
    Cast(Cast(x) * Cos(f) + Cast(rotate_half(x)) * Sin(f))      (OLMo rotates in fp32, whatever its dtype)
    -> the same (ModernBERT, too, in fp32 by tables that were cast)

The same goes for pairs of neighbours (ERNIE and Cohere rotate them in fp32).

Why: the result of an fp32 rotation is narrow in any case. With narrow tables it is rounded as in most models, and the rotation
can move into the attention kernel. On CUDA a step of 6 layers is 141 kernels fewer (OLMo), 198 fewer (ERNIE 4.5).
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.rules.fusion import _rotary_embedding

from skipdecode.graph_passes.fuse_interleaved_rotary import InterleavedFusion, fuse_rotary, repeated_entries, rotated_pairs
from skipdecode.graph_passes.fuse_tokens_first_rotary import TokensFirstFusion
from skipdecode.graph_passes.tokens_first import HEADS_FIRST


class FuseNarrowRotaryPass(ir.passes.InPlacePass):
    """Fuses each rotary embedding with cast tables, of whole heads or of the first part of each.

    Declines where the head size or the number of heads is not static.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        kinds = (
            _NarrowRotaryFusion,
            _NarrowTokensFirst,
            _WideRotaryFusion,
            _WideByNarrowTables,
            _NarrowTablesTwice,
            _WideTablesTwice,
            _WideAnglesTwice,
        )
        return fuse_rotary(model, *(kind.rule() for kind in kinds))


class _NarrowRotaryFusion(_rotary_embedding.RotaryEmbedding23Fusion):  # type: ignore[misc]
    def pattern(self, op: Any, x: Any, freqs: Any, start1: Any, end1: Any, start2: Any, end2: Any, one1: Any, one2: Any) -> Any:
        return _rotated_halves(op, x, freqs, start1, end1, start2, end2, one1, one2)

    def rewrite(self, op: Any, x: ir.Value, freqs: Any, **_: Any) -> Any:
        return _fused_rotary(op, x, freqs, interleaved=0)


class _NarrowTokensFirst(TokensFirstFusion):
    """Gemma 4: heads are rotated before they are transposed to the front."""

    def pattern(self, op: Any, x: Any, freqs: Any, start1: Any, end1: Any, start2: Any, end2: Any, one1: Any, one2: Any) -> Any:
        return op.Transpose(_rotated_halves(op, x, freqs, start1, end1, start2, end2, one1, one2), perm=HEADS_FIRST)

    def rewrite(self, op: Any, x: ir.Value, freqs: Any, **_: Any) -> Any:
        heads = op.Transpose(x, perm=HEADS_FIRST)
        return op.RotaryEmbedding(heads, *_cast_tables(op, freqs, x), interleaved=0, num_heads=x.shape[2])  # type: ignore[index]


class _WideRotaryFusion(_NarrowRotaryFusion):
    def pattern(self, op: Any, x: Any, freqs: Any, start1: Any, end1: Any, start2: Any, end2: Any, one1: Any, one2: Any) -> Any:
        angles = op.Concat(freqs, freqs, axis=-1)
        cos, sin = op.Unsqueeze(op.Cos(angles), one1), op.Unsqueeze(op.Sin(angles), one2)
        half = op.Cast(_rotary_embedding._rotate_half_pattern(op, x, start1, end1, start2, end2))
        return op.Cast(op.Cast(x) * cos + half * sin)


class _WideByNarrowTables(_NarrowRotaryFusion):
    """ModernBERT: rotates in fp32, but by tables that were rounded to the narrow type."""

    def pattern(self, op: Any, x: Any, freqs: Any, start1: Any, end1: Any, start2: Any, end2: Any, one1: Any, one2: Any) -> Any:
        angles = op.Concat(freqs, freqs, axis=-1)
        tables = ((op.Cos(angles), one1), (op.Sin(angles), one2))
        cos, sin = (op.Cast(op.Unsqueeze(op.Cast(table), axis)) for table, axis in tables)
        wide = op.Cast(x)
        return op.Cast(wide * cos + _rotary_embedding._rotate_half_pattern(op, wide, start1, end1, start2, end2) * sin)


class _CastTablesFusion(InterleavedFusion):
    def rewrite(self, op: Any, x: ir.Value, freqs: Any, **_: Any) -> Any:
        return _fused_rotary(op, x, freqs, interleaved=1)


class _NarrowTablesTwice(_CastTablesFusion):
    def pattern(self, op: Any, x: Any, freqs: Any, half_1: Any, half_2: Any, shape_1: Any, shape_2: Any, x_shape: Any) -> Any:
        angles = op.Concat(freqs, freqs, axis=-1)
        cos = repeated_entries(op, op.Cast(op.Cos(angles)), half_1, shape_1)
        return x * cos + rotated_pairs(op, x, x_shape) * repeated_entries(op, op.Cast(op.Sin(angles)), half_2, shape_2)


class _WideTablesTwice(_CastTablesFusion):
    def pattern(self, op: Any, x: Any, freqs: Any, half_1: Any, half_2: Any, shape_1: Any, shape_2: Any, x_shape: Any) -> Any:
        angles = op.Concat(freqs, freqs, axis=-1)
        cos, sin = repeated_entries(op, op.Cos(angles), half_1, shape_1), repeated_entries(op, op.Sin(angles), half_2, shape_2)
        return op.Cast(op.Cast(x) * cos + op.Cast(rotated_pairs(op, x, x_shape)) * sin)


class _WideAnglesTwice(_CastTablesFusion):
    """Cohere: rotates in fp32, but by tables that were rounded to the narrow type."""

    def pattern(self, op: Any, x: Any, freqs: Any, shape: Any, x_shape: Any) -> Any:
        angles = op.Reshape(op.Expand(op.Unsqueeze(freqs, [3]), [1, 1, 1, 2]), shape)
        cos, sin = (op.Cast(op.Unsqueeze(op.Cast(table), [1])) for table in (op.Cos(angles), op.Sin(angles)))
        wide = op.Cast(x)
        return op.Cast(wide * cos + rotated_pairs(op, wide, x_shape) * sin)


def _rotated_halves(op: Any, x: Any, freqs: Any, start1: Any, end1: Any, start2: Any, end2: Any, one1: Any, one2: Any) -> Any:
    """The pattern of pairs across the halves, rotated by tables that were cast."""
    angles = op.Concat(freqs, freqs, axis=-1)
    cos, sin = op.Unsqueeze(op.Cast(op.Cos(angles)), one1), op.Unsqueeze(op.Cast(op.Sin(angles)), one2)
    return x * cos + _rotary_embedding._rotate_half_pattern(op, x, start1, end1, start2, end2) * sin


def _fused_rotary(op: Any, x: ir.Value, freqs: Any, interleaved: int) -> Any:
    return op.RotaryEmbedding(x, *_cast_tables(op, freqs, x), interleaved=interleaved, num_heads=x.shape[1])  # type: ignore[index]


def _cast_tables(op: Any, freqs: Any, x: ir.Value) -> tuple[Any, Any]:
    """Cosines and sines of `freqs` in the type of `x`."""
    return op.Cast(op.Cos(freqs), to=x.dtype), op.Cast(op.Sin(freqs), to=x.dtype)
