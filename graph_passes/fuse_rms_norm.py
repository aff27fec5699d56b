"""Fuse a root mean square norm into one operator of one type.

    Cast(x * Reciprocal(Sqrt(ReduceMean(x * x) + epsilon))) * scale      ->      RMSNormalization(x, scale)

This is onnxscript's fusion, stricter in two ways. The operator allows x and scale of different types, but ONNX Runtime's CUDA
provider has no such kernel for bf16, and its CPU provider none at all, so casts are added. And not every factor of a norm is a
scale: passes that move a norm from axis to axis would leave a temperature of each position behind.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult
from onnxscript.rewriter.rules.fusion import _rms_normalization

from skipdecode.graph_passes.apply_rules import apply_rules


class FuseRMSNormPass(ir.passes.InPlacePass):
    """Fuses each root mean square norm with a scale.

    Declines where the scale is a single number or differs by token. It may differ by group or head (Falcon-H1).
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        rules = [_Norm.rule("RMSNorm", mul_order=order) for order in (True, False)]
        return ir.passes.PassResult(model, apply_rules(model, *rules))


class _Norm(_rms_normalization.RmsNormFusion):  # type: ignore[misc]
    def check(self, op: Any, x: ir.Value, scale: ir.Value, **others: Any) -> MatchResult:
        result: MatchResult = super().check(op, x, scale, **others)
        sizes = list(scale.shape) if scale.shape is not None else []
        if not sizes or not all(isinstance(size, int) for size in sizes) or sizes[-1] != x.shape[-1]:  # type: ignore[index]
            return result.fail("It is not one weight for each number of a row.", scale)
        return result

    def rewrite(self, op: Any, x: ir.Value, scale: ir.Value, epsilon: ir.Value, **others: Any) -> Any:
        kind = scale.dtype
        wide = ir.DataType.FLOAT if ir.DataType.FLOAT in (x.dtype, kind) else kind
        assert kind is not None and wide is not None
        norm = super().rewrite(op, _cast(op, x, wide), _cast(op, scale, wide), epsilon, **others)
        norm.shape, norm.type = x.shape, ir.TensorType(wide)
        return _cast(op, norm, kind)


def _cast(op: Any, value: ir.Value, to: ir.DataType) -> Any:
    if value.dtype == to:
        return value
    made = op.Cast(value, to=to)
    made.shape, made.type = value.shape, ir.TensorType(to)
    return made
