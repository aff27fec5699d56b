"""Write a power of -1/2 (Gemma 4's norms) as the two operators by which norms are recognised.

    Pow(x, -0.5)      ->      Reciprocal(Sqrt(x))

Why: onnxscript's fusion of RMSNormalization knows only that form. With it, it finds 6 more norms in a layer of Gemma 4.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import RewriteRuleClassBase

from skipdecode.graph_passes.apply_rules import apply_rules


class WriteOutInverseRootPass(ir.passes.InPlacePass):
    """Rewrites every Pow with the constant exponent -1/2."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, apply_rules(model, _InverseRoot.rule()))


class _InverseRoot(RewriteRuleClassBase):  # type: ignore[misc]
    def pattern(self, op: Any, x: Any) -> Any:
        return op.Pow(x, -0.5)

    def rewrite(self, op: Any, x: ir.Value) -> Any:
        return op.Reciprocal(op.Sqrt(x))
