"""Rewrite products of a weight by transposed rows (Mamba's time steps) to the form of all other linear layers.

    Transpose(MatMul(weight [N,K], Transpose(x [B,S,K])))      ->      MatMul(x, Transpose(weight))

Why: the passes that pack and quantise weights know only that form.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, RewriteRuleClassBase

from skipdecode.graph_passes.apply_rules import apply_rules
from skipdecode.graph_passes.conventions import is_parameter


class TurnWeightFirstProductsPass(ir.passes.InPlacePass):
    """Rewrites each product of a weight by transposed rows. Declines unless the weight is a parameter [N,K]."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        rule = _WeightFirst.rule(remove_nodes=False)  # other readers of the product keep it
        return ir.passes.PassResult(model, apply_rules(model, rule))


class _WeightFirst(RewriteRuleClassBase):  # type: ignore[misc]
    def pattern(self, op: Any, weight: Any, x: Any) -> Any:
        return op.Transpose(op.MatMul(weight, op.Transpose(x, perm=[0, 2, 1])), perm=[0, 2, 1])

    def check(self, _: Any, weight: ir.Value, **__: Any) -> MatchResult:
        result = MatchResult()
        if not weight.is_initializer() or not is_parameter(weight) or weight.shape is None or len(weight.shape) != 2:
            return result.fail("No matrix that is a parameter.", weight)
        return result

    def rewrite(self, op: Any, weight: ir.Value, x: ir.Value) -> Any:
        return op.MatMul(x, op.Transpose(weight, perm=[1, 0]))
