"""A rotary embedding of a narrow graph as one operator: its tables are cast from fp32, which hides it from clean_trace.

x * Cast(Cos(f)) + rotate_half(x) * Cast(Sin(f))      ->      RotaryEmbedding(x, Cast(Cos(f)), Cast(Sin(f)))

So are the tables of pairs of neighbours. Models that rotate in fp32 whatever their dtype (Cohere, ERNIE) keep their pieces.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.rules.fusion import _rotary_embedding

from skipdecode.graph_passes.interleaved_rotary import InterleavedFusion, entries_twice, fuse_rotary, turn


class NarrowRotaryPass(ir.passes.InPlacePass):
    """onnxscript's own fusion, with the casts in its pattern; also where only a part of each head is rotated."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return fuse_rotary(model, _NarrowRotaryFusion.rule(), _NarrowTablesTwice.rule())


class _NarrowRotaryFusion(_rotary_embedding.RotaryEmbedding23Fusion):  # type: ignore[misc]
    def pattern(self, op: Any, x: Any, freqs: Any, start1: Any, end1: Any, start2: Any, end2: Any, one1: Any, one2: Any) -> Any:
        angles = op.Concat(freqs, freqs, axis=-1)
        cos, sin = op.Unsqueeze(op.Cast(op.Cos(angles)), one1), op.Unsqueeze(op.Cast(op.Sin(angles)), one2)
        return x * cos + _rotary_embedding._rotate_half_pattern(op, x, start1, end1, start2, end2) * sin

    def rewrite(self, op: Any, x: ir.Value, freqs: Any, **_: Any) -> Any:
        return _rotary(op, x, freqs, interleaved=0)


class _NarrowTablesTwice(InterleavedFusion):
    def pattern(self, op: Any, x: Any, freqs: Any, half_1: Any, half_2: Any, shape_1: Any, shape_2: Any, turned: Any) -> Any:
        angles = op.Concat(freqs, freqs, axis=-1)
        cos = entries_twice(op, op.Cast(op.Cos(angles)), half_1, shape_1)
        return x * cos + turn(op, x, turned) * entries_twice(op, op.Cast(op.Sin(angles)), half_2, shape_2)

    def rewrite(self, op: Any, x: ir.Value, freqs: Any, **_: Any) -> Any:
        return _rotary(op, x, freqs, interleaved=1)


def _rotary(op: Any, x: ir.Value, freqs: Any, interleaved: int) -> Any:
    cos, sin = op.Cast(op.Cos(freqs), to=x.dtype), op.Cast(op.Sin(freqs), to=x.dtype)
    return op.RotaryEmbedding(x, cos, sin, interleaved=interleaved, num_heads=x.shape[1])  # type: ignore[index]
