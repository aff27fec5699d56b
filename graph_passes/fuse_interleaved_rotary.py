"""Fuse a rotary embedding of neighbours (elements 2i and 2i + 1 are a pair, as in GLM and Cohere) into one operator.

    x * twice(Cos(f)) + Reshape([-x_odd, x_even]) * twice(Sin(f))      ->      RotaryEmbedding<interleaved=1>(x, Cos(f), Sin(f))

Why: a rotary embedding can only move into GroupQueryAttention as one operator, and onnxscript's fusion only knows pairs across
the halves. A GLM layer has 13 operators instead of 70. A decode step of 12 layers of width 1024 at batch 1 (AMD EPYC, 2 cores,
interleaved): GLM is 1.29x as fast in int4 and 1.10x in fp32, Cohere 1.20x and 1.06x.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript import rewriter
from onnxscript.rewriter import _ir_utils, pattern
from onnxscript.rewriter.rules.fusion import _rotary_embedding

from skipdecode.graph_passes.apply_rules import apply_rules
from skipdecode.graph_passes.conventions import TO_THE_END, static_dim


class FuseInterleavedRotaryPass(ir.passes.InPlacePass):
    """Fuses each rotary embedding of neighbours, of whole heads or of the first part of each.

    Declines where the head size or the number of heads is not static.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return fuse_rotary(model, _AnglesTwice.rule(), _TablesTwice.rule())


def fuse_rotary(model: ir.Model, *rules: rewriter.RewriteRule) -> ir.passes.PassResult:
    """Apply `rules`, then let operators that rotate the first part of each head take whole heads (`rotary_embedding_dim`)."""
    fused = [apply_rules(model, rule) for rule in (*rules, _PartFusion.rule())]
    return ir.passes.PassResult(model, any(fused))


class InterleavedFusion(pattern.RewriteRuleClassBase):  # type: ignore[misc]
    """Check and replacement for all forms of the tables; a subclass's `pattern` is the form."""

    def __init__(self) -> None:
        super().__init__(remove_nodes=False)  # the tables have other readers

    def check(self, _: Any, x: ir.Value, freqs: ir.Value, **others: ir.Value) -> pattern.MatchResult:
        result = pattern.MatchResult()
        size = static_head_size(x)
        if size is None:
            return result.fail("The number of heads or their size is not static.", x)
        if freqs.shape is None or freqs.shape[-1] != size / 2:
            return result.fail("There is not one frequency a pair.", freqs)
        if not all(_ir_utils.is_singleton_value(others[name], size // 2) for name in others if name.startswith("half")):
            return result.fail("The tables are not cut in the middle.", freqs)
        return result

    def rewrite(self, op: Any, x: ir.Value, freqs: ir.Value, **_: Any) -> Any:
        return op.RotaryEmbedding(x, op.Cos(freqs), op.Sin(freqs), interleaved=1, num_heads=static_dim(x, 1))


class _AnglesTwice(InterleavedFusion):
    """Cohere: repeats each angle, then takes cosines and sines."""

    def pattern(self, op: Any, x: Any, freqs: Any, shape: Any, x_shape: Any) -> Any:
        angles = op.Reshape(op.Expand(op.Unsqueeze(freqs, [3]), [1, 1, 1, 2]), shape)
        return x * op.Unsqueeze(op.Cos(angles), [1]) + rotated_pairs(op, x, x_shape) * op.Unsqueeze(op.Sin(angles), [1])


class _TablesTwice(InterleavedFusion):
    """GLM, ERNIE, Helium: make tables for pairs across the halves, then repeat each entry of their first half."""

    def pattern(self, op: Any, x: Any, freqs: Any, half_1: Any, half_2: Any, shape_1: Any, shape_2: Any, x_shape: Any) -> Any:
        angles = op.Concat(freqs, freqs, axis=-1)
        cos, sin = repeated_entries(op, op.Cos(angles), half_1, shape_1), repeated_entries(op, op.Sin(angles), half_2, shape_2)
        return x * cos + rotated_pairs(op, x, x_shape) * sin


def static_head_size(x: ir.Value) -> int | None:
    """The head size D of x [B,N,S,D]; None where D or the number of heads N is not static."""
    heads, size = (x.shape[1], x.shape[3]) if x.shape is not None and len(x.shape) == 4 else (None, None)
    return size if isinstance(heads, int) and isinstance(size, int) else None


def repeated_entries(op: Any, table: Any, half: Any, shape: Any) -> Any:
    """The pattern of the first `half` entries of a table [B,S,D], each twice in a row: [B,1,S,D]."""
    first = op.Slice(op.Unsqueeze(table, [1]), [0], half, [3], [1])
    return op.Reshape(op.Expand(op.Unsqueeze(first, [4]), [1, 1, 1, 1, 2]), shape)


def even_and_odd(op: Any, x: Any) -> tuple[Any, Any]:
    """The patterns of the first and the second elements of the pairs in x [B,N,S,D]."""
    return op.Slice(x, [0], [TO_THE_END], [3], [2]), op.Slice(x, [1], [TO_THE_END], [3], [2])


def rotated_pairs(op: Any, x: Any, shape: Any) -> Any:
    """The pattern of x [B,N,S,D] with each pair (a, b) replaced by (-b, a)."""
    even, odd = even_and_odd(op, x)
    return op.Reshape(op.Concat(op.Unsqueeze(op.Neg(odd), [-1]), op.Unsqueeze(even, [-1]), axis=-1), shape)


class _PartFusion(_rotary_embedding.PartialRotaryEmbedding23Fusion):  # type: ignore[misc]
    """onnxscript's rule, but also for interleaved pairs, which the operator's specification allows."""

    def check(self, _: Any, end1: ir.Value, start2: ir.Value, x_part_1_rope: ir.Value, **__: Any) -> pattern.MatchResult:
        result, end = pattern.MatchResult(), _ir_utils.get_singleton_value(end1)
        node = x_part_1_rope.producer()
        if end is None or end != _ir_utils.get_singleton_value(start2):
            return result.fail("The parts do not meet.", end1)
        if node is None or "rotary_embedding_dim" in node.attributes:
            return result.fail("It is a part already.", x_part_1_rope)
        return result
