"""Fuse a rotary embedding that computes each half of its result by itself (gpt-oss, DeepSeek-V3) into one operator.

    a, b = Split(x);  Concat(a * cos - b * sin, b * cos + a * sin)      ->      RotaryEmbedding(x, cos, sin)

    the same with a, b = the even and the odd elements of x
    -> RotaryEmbedding(Gather(x, 0 2 .. 1 3 ..), cos, sin)

Why: as in `fuse_interleaved_rotary`. The tables [B,S,D/2] may hold any numbers: YaRN's are scaled by a factor.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, RewriteRuleClassBase

from skipdecode.graph_passes.conventions import int64_constant_in_rule, static_dim
from skipdecode.graph_passes.fuse_interleaved_rotary import even_and_odd, fuse_rotary, static_head_size


class FuseHalvesRotaryPass(ir.passes.InPlacePass):
    """Fuses each rotary embedding computed by halves. Declines where the head size or the number of heads is not static."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        rules = [kind.rule(remove_nodes=False) for kind in (_Halves, _Neighbours)]  # the tables have other readers
        return fuse_rotary(model, *rules)


class _Halves(RewriteRuleClassBase):  # type: ignore[misc]
    def pattern(self, op: Any, x: Any, cos: Any, sin: Any) -> Any:
        first, second = op.Split(x, axis=3, num_outputs=2, _outputs=2)
        return _rotated(op, first, second, cos, sin)

    def check(self, _: Any, x: ir.Value, cos: ir.Value, sin: ir.Value) -> MatchResult:
        result = MatchResult()
        size = static_head_size(x)
        if size is None:
            return result.fail("The number of heads or their size is not static.", x)
        if any(table.shape is None or len(table.shape) != 3 or table.shape[2] != size / 2 for table in (cos, sin)):
            return result.fail("There is not one entry a pair.", cos)
        return result

    def rewrite(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value) -> Any:
        return op.RotaryEmbedding(x, cos, sin, interleaved=0, num_heads=static_dim(x, 1))


class _Neighbours(_Halves):
    def pattern(self, op: Any, x: Any, cos: Any, sin: Any) -> Any:
        return _rotated(op, *even_and_odd(op, x), cos, sin)

    def rewrite(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value) -> Any:
        size = static_dim(x, 3)
        halves_order = [*range(0, size, 2), *range(1, size, 2)]
        halves = op.Gather(x, int64_constant_in_rule(op, *halves_order), axis=3)
        halves.shape, halves.type = x.shape, x.type
        return op.RotaryEmbedding(halves, cos, sin, interleaved=0, num_heads=static_dim(x, 1))


def _rotated(op: Any, first: Any, second: Any, cos: Any, sin: Any) -> Any:
    """The pattern of rotated pairs (first, second), with the first elements of all pairs in front."""
    cos_4, sin_4 = op.Unsqueeze(cos, [1]), op.Unsqueeze(sin, [1])
    return op.Concat(first * cos_4 - second * sin_4, second * cos_4 + first * sin_4, axis=-1)
