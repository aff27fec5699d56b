"""Fuse a root mean square norm without weights (Gemma 4's values, all of nanochat's norms) into one operator, scaled by ones.

    x * Reciprocal(Sqrt(ReduceMean(x * x) + epsilon))      ->      RMSNormalization(x, ones)

Why: runtimes have a kernel for the whole norm, and onnxscript's fusion only matches norms with a scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import _ir_utils
from onnxscript.rewriter.pattern import MatchResult, RewriteRuleClassBase

from skipdecode.graph_passes.apply_rules import apply_rules
from skipdecode.graph_passes.conventions import static_dim


class FuseUnitNormPass(ir.passes.InPlacePass):
    """Fuses each root mean square norm without weights.

    Declines where x is not fp32 or its last axis not static. Runs after FuseRMSNormPass, whose pattern contains this one.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, apply_rules(model, _UnitNorm.rule()))


class _UnitNorm(RewriteRuleClassBase):  # type: ignore[misc]
    def pattern(self, op: Any, x: Any, epsilon: Any) -> Any:
        mean = op.ReduceMean(op.Pow(x, 2.0), [-1], keepdims=1, noop_with_empty_axes=0)
        return x * op.Reciprocal(op.Sqrt(mean + epsilon))

    def check(self, _: Any, x: ir.Value, epsilon: ir.Value) -> MatchResult:
        result = MatchResult()
        if not isinstance(_ir_utils.get_singleton_value(epsilon), float):
            return result.fail("Epsilon is not a constant.", epsilon)
        if x.dtype != ir.DataType.FLOAT or x.shape is None or not isinstance(x.shape[-1], int):
            return result.fail("It is not fp32, or the size of what is normed is not static.", x)
        return result

    def rewrite(self, op: Any, x: ir.Value, epsilon: ir.Value) -> Any:
        ones = op.Constant(value=ir.tensor(np.ones(static_dim(x, -1), np.float32)))
        return op.RMSNormalization(x, ones, axis=-1, epsilon=_ir_utils.get_singleton_value(epsilon), stash_type=1)
