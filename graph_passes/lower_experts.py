"""Lower a mixture of experts to ONNX Runtime's operator, which computes the chosen experts alone.

    Sum over E of (MatMul(SwiGLU(MatMul(x, W_gate_up)), W_down) * ScatterElements(0, chosen, weights))
    -> com.microsoft.MoE(x, Log(weights), W_gate_up with gate and up taking turns, W_down) * sum of weights

The operator routes by itself: softmax of what it is given, the K largest. Of logarithms that gives back the weights, divided by
their sum, so that every model's own way to choose experts and weigh them stays in the graph.
"""

from __future__ import annotations

import logging
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript import rewriter
from onnxscript.rewriter.pattern import MatchResult, RewriteRuleClassBase

from skipdecode.graph_passes.clean_trace import is_parameter
from skipdecode.graph_passes.lower_attention import MS_DOMAIN
from skipdecode.graph_passes.mapped import release_pages

logger = logging.getLogger(__name__)


class LowerExpertsPass(ir.passes.InPlacePass):
    """Takes what the exporter traces (`exporter.experts`); leaves graphs without experts as they are."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = rewriter.RewritePass([_Experts.rule(), _NarrowExperts.rule()])(model).modified
        if modified:
            model.graph.opset_imports[MS_DOMAIN] = 1
            RemoveUnusedNodesPass()(model)
        lowered = [node for node in model.graph if node.op_type == "MoE"]
        logger.info("lowered %d mixtures of experts", len(lowered))
        return ir.passes.PassResult(model, modified)

    def ensures(self, model: ir.Model) -> None:
        left = [
            value.name
            for node in model.graph
            if node.op_type == "Transpose"
            for value in node.inputs
            if value is not None and value.shape is not None and len(value.shape) == 3 and is_parameter(value)
        ]
        if left:
            raise ir.passes.PostconditionError(f"experts that were not lowered: {left}")


class _Experts(RewriteRuleClassBase):  # type: ignore[misc]
    def pattern(self, op: Any, x: Any, zeros: Any, chosen: Any, weights: Any, gate_up: Any, down: Any) -> Any:
        return op.ReduceSum(self.weighted(op, x, zeros, chosen, weights, gate_up, down), [0], keepdims=0)

    def weighted(self, op: Any, x: Any, zeros: Any, chosen: Any, weights: Any, gate_up: Any, down: Any) -> Any:
        both = op.MatMul(op.Unsqueeze(x, [0]), op.Transpose(gate_up, perm=[0, 2, 1]))
        gate, up = op.Split(both, axis=2, num_outputs=2, _outputs=2)
        products = op.MatMul(op.Mul(op.Mul(gate, op.Sigmoid(gate)), up), op.Transpose(down, perm=[0, 2, 1]))
        shares = op.Unsqueeze(op.Transpose(op.ScatterElements(zeros, chosen, weights, axis=1), perm=[1, 0]), [2])
        return op.Mul(products, shares)

    def check(self, _: Any, chosen: ir.Value, gate_up: ir.Value, down: ir.Value, **__: Any) -> MatchResult:
        result = MatchResult()
        if gate_up.const_value is None or down.const_value is None:
            return result.fail("The experts' weights are not constant.", gate_up)
        if chosen.shape is None or not isinstance(chosen.shape[1], int):
            return result.fail("How many experts a token has is not static.", chosen)
        return result

    def rewrite(
        self, op: Any, x: ir.Value, zeros: ir.Value, chosen: ir.Value, weights: ir.Value, gate_up: ir.Value, down: ir.Value
    ) -> Any:
        shares = op.ScatterElements(zeros, chosen, weights, axis=1)
        assert chosen.shape is not None
        mixed = op.MoE(
            x, op.Log(shares), op.initializer(_taking_turns(gate_up)), None, down,
            k=chosen.shape[1], activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.0, activation_beta=0.0,
            normalize_routing_weights=1, _domain=MS_DOMAIN,
        )  # fmt: skip
        return op.Mul(mixed, op.ReduceSum(weights, op.Constant(value_ints=[1]), keepdims=1))


class _NarrowExperts(_Experts):
    """A sum of narrow floats is traced in fp32."""

    def pattern(self, op: Any, x: Any, zeros: Any, chosen: Any, weights: Any, gate_up: Any, down: Any) -> Any:
        products = self.weighted(op, x, zeros, chosen, weights, gate_up, down)
        return op.Cast(op.ReduceSum(op.Cast(products), [0], keepdims=0))


def _taking_turns(gate_up: ir.Value) -> ir.LazyTensor:
    """A parameter [E,2I,H] of gates above ups as gate, up, gate, up, ..; put in order each time it is read."""
    tensor = gate_up.const_value
    assert tensor is not None
    experts, doubled, width = tensor.shape.numpy()
    name = f"{gate_up.name}.interleaved"

    def interleaved() -> ir.TensorProtocol:
        turned = tensor.numpy().reshape(experts, 2, doubled // 2, width).swapaxes(1, 2).copy()
        release_pages(tensor)
        return ir.tensor(turned.reshape(experts, doubled, width), name=name)

    return ir.LazyTensor(interleaved, dtype=tensor.dtype, shape=ir.Shape((experts, doubled, width)), name=name)
