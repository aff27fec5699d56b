"""Fuse a rotary embedding of heads that are transposed to the front only afterwards (Gemma 4) into one operator.

    Transpose(x * Unsqueeze(Cos(f, f), 2) + rotate_half(x) * Unsqueeze(Sin(f, f), 2))    ->    RotaryEmbedding(Transpose(x), ..)

Why: as in `fuse_interleaved_rotary`. onnxscript's fusion only knows x [B,N,S,D], not [B,S,N,D].
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import _ir_utils
from onnxscript.rewriter.pattern import MatchResult
from onnxscript.rewriter.rules.fusion import _rotary_embedding

from skipdecode.graph_passes.conventions import static_dim
from skipdecode.graph_passes.fuse_interleaved_rotary import fuse_rotary
from skipdecode.graph_passes.tokens_first import HEADS_FIRST


class FuseTokensFirstRotaryPass(ir.passes.InPlacePass):
    """Fuses each rotary embedding of heads transposed afterwards.

    Declines where the head size or the number of heads is not static.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return fuse_rotary(model, TokensFirstFusion.rule())


class TokensFirstFusion(_rotary_embedding.RotaryEmbedding23Fusion):  # type: ignore[misc]
    def pattern(self, op: Any, x: Any, freqs: Any, start1: Any, end1: Any, start2: Any, end2: Any, one1: Any, one2: Any) -> Any:
        rotated = super().pattern(op, x, freqs, start1, end1, start2, end2, one1, one2)
        return op.Transpose(rotated, perm=HEADS_FIRST)

    def check(
        self, _: Any, x: ir.Value, start1: ir.Value, end1: ir.Value, start2: ir.Value, one1: ir.Value, one2: ir.Value, **__: Any
    ) -> MatchResult:
        result = MatchResult()
        heads, size = (x.shape[2], x.shape[3]) if x.shape is not None and len(x.shape) == 4 else (None, None)
        if not isinstance(heads, int) or not isinstance(size, int):
            return result.fail("The number of heads or their size is not static.", x)
        if not all(_ir_utils.is_singleton_value(axis, 2) for axis in (one1, one2)):
            return result.fail("The tables are not spread over the heads.", one1)
        halves = ((start1, 0), (end1, size // 2), (start2, size // 2))
        if not all(_ir_utils.is_singleton_value(value, number) for value, number in halves):
            return result.fail("The head is not cut in the middle.", end1)
        return result

    def rewrite(self, op: Any, x: ir.Value, freqs: ir.Value, **_: Any) -> Any:
        heads_first = op.Transpose(x, perm=HEADS_FIRST)
        return op.RotaryEmbedding(heads_first, op.Cos(freqs), op.Sin(freqs), interleaved=0, num_heads=static_dim(x, 2))
