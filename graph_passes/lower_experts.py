"""Lower a mixture of experts to ONNX Runtime's MoE operator, which computes only the chosen experts.

    Sum over E of (MatMul(SwiGLU(MatMul(x, W_gate_up)), W_down) * ScatterElements(0, chosen, weights))
    -> com.microsoft.MoE(x, Log(weights), W_gate_up with rows gate, up, gate, up, .., W_down) * sum of weights

The operator does its own routing: it takes the softmax of its logits and the K largest. Given logarithms of weights, that returns
the weights divided by their sum. So each model's own way to choose and weigh experts stays in the graph. Biases (gpt-oss) become
inputs of the operator, which weighs each with its expert.

The operator's activation is gate * Sigmoid(alpha * gate) * up. The square of a ReLU (Nemotron-H, which has no gate) becomes that
activation with up as its own gate and a steep alpha. It needs no other operator, but a step reads the up weights twice, 1.5x the
bytes of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import _ir_utils
from onnxscript.rewriter.pattern import MatchResult, RewriteRuleClassBase

from skipdecode.graph_passes.apply_rules import apply_rules
from skipdecode.graph_passes.conventions import MS_DOMAIN, TO_THE_END, int64_constant_in_rule, is_parameter
from skipdecode.graph_passes.mapped import release_pages

Array = np.ndarray[Any, np.dtype[Any]]
_STEEP_ALPHA = 1e4  # x^2 Sigmoid(_STEEP_ALPHA x) differs from Relu(x)^2 by at most 5e-9, at |x| of about 1e-4


class LowerExpertsPass(ir.passes.InPlacePass):
    """Lowers each mixture, as the exporter traces it (`exporter.experts`). Leaves graphs without experts as they are."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        kinds = (Experts, TurnedExperts, SquaredExperts, BiasedExperts, NarrowBiasedExperts)
        modified = apply_rules(model, *(kind.rule() for kind in kinds))
        if modified:
            model.graph.opset_imports[MS_DOMAIN] = 1
        return ir.passes.PassResult(model, modified)

    def ensures(self, model: ir.Model) -> None:
        if not any(node.op_type == "ScatterElements" for node in model.graph):  # every mixture weighs its experts by one
            return
        left = [
            value.name
            for node in model.graph
            if node.op_type in ("Transpose", "MatMul")
            for value in node.inputs
            if value is not None and value.is_initializer() and is_parameter(value) and len(value.shape or ()) == 3
        ]
        if left:
            raise ir.passes.PostconditionError(f"experts that were not lowered: {left}")


class Experts(RewriteRuleClassBase):  # type: ignore[misc]
    def pattern(self, op: Any, x: Any, zeros: Any, chosen: Any, weights: Any, gate_up: Any, down: Any) -> Any:
        gate_and_up = op.MatMul(op.Unsqueeze(x, [0]), self.transposed(op, gate_up))
        gate, up = op.Split(gate_and_up, axis=2, num_outputs=2, _outputs=2)
        products = op.MatMul(op.Mul(self.activated(op, gate), up), self.transposed(op, down))
        return op.ReduceSum(_weighted(op, products, zeros, chosen, weights), [0], keepdims=0)

    def activated(self, op: Any, gate: Any) -> Any:
        """The pattern of the activation."""
        return op.Mul(gate, op.Sigmoid(gate))

    def transposed(self, op: Any, parameter: Any) -> Any:
        """The pattern of a parameter [E,N,K] transposed to [E,K,N]."""
        return op.Transpose(parameter, perm=[0, 2, 1])

    def check(self, _: Any, chosen: ir.Value, gate_up: ir.Value, down: ir.Value, **__: Any) -> MatchResult:
        return _check(chosen, gate_up, down)

    def rewrite(
        self, op: Any, x: ir.Value, zeros: ir.Value, chosen: ir.Value, weights: ir.Value, gate_up: ir.Value, down: ir.Value
    ) -> Any:
        parameters = (op.initializer(_interleaved(gate_up)), None, down)
        return _mixture(op, x, zeros, chosen, weights, parameters, activation_alpha=1.0, activation_beta=0.0)


class GeluExperts(Experts):
    """Gemma 4's GELU, which ONNX Runtime's operator lacks; for `split_experts` and `write_out_experts`."""

    def activated(self, op: Any, gate: Any) -> Any:
        return op.Gelu(gate, approximate="tanh")


class TurnedExperts(Experts):
    """Llama 4: W_gate_up [E,H,2I], W_down [E,I,H]."""

    def transposed(self, op: Any, parameter: Any) -> Any:
        return parameter

    def rewrite(
        self, op: Any, x: ir.Value, zeros: ir.Value, chosen: ir.Value, weights: ir.Value, gate_up: ir.Value, down: ir.Value
    ) -> Any:
        gate_up, down = (op.initializer(transposed_experts(matrices)) for matrices in (gate_up, down))
        return super().rewrite(op, x, zeros, chosen, weights, gate_up, down)


class SquaredExperts(RewriteRuleClassBase):  # type: ignore[misc]
    def pattern(self, op: Any, x: Any, zeros: Any, chosen: Any, weights: Any, up: Any, down: Any) -> Any:
        positive = op.Relu(op.MatMul(op.Unsqueeze(x, [0]), op.Transpose(up, perm=[0, 2, 1])))
        products = op.MatMul(op.Pow(positive, 2.0), op.Transpose(down, perm=[0, 2, 1]))
        return op.ReduceSum(_weighted(op, products, zeros, chosen, weights), [0], keepdims=0)

    def check(self, _: Any, chosen: ir.Value, up: ir.Value, down: ir.Value, **__: Any) -> MatchResult:
        return _check(chosen, up, down)

    def rewrite(
        self, op: Any, x: ir.Value, zeros: ir.Value, chosen: ir.Value, weights: ir.Value, up: ir.Value, down: ir.Value
    ) -> Any:
        parameters = (op.initializer(_as_own_gate(up)), None, down)
        return _mixture(op, x, zeros, chosen, weights, parameters, activation_alpha=_STEEP_ALPHA, activation_beta=0.0)


class BiasedExperts(RewriteRuleClassBase):  # type: ignore[misc]
    """gpt-oss: W_gate_up [E,H,2I] with columns gate, up, gate, up, .., W_down [E,I,H], biases, gate and up clamped.

    (up + beta) * gate * Sigmoid(alpha * gate), gate at most `limit` and up within -limit .. limit
    """

    def pattern(
        self, op: Any, x: Any, zeros: Any, chosen: Any, weights: Any, gate_up: Any, down: Any,
        up_bias: Any, down_bias: Any, alpha: Any, beta: Any, limit: Any, low: Any, high: Any,
    ) -> Any:  # fmt: skip
        gate_and_up = op.Add(op.MatMul(op.Unsqueeze(x, [0]), gate_up), op.Unsqueeze(up_bias, [1]))
        gate = self.clamped(op, op.Slice(gate_and_up, [0], [TO_THE_END], [2], [2]), None, limit)
        up = self.clamped(op, op.Slice(gate_and_up, [1], [TO_THE_END], [2], [2]), low, high)
        inner = op.Mul(op.Add(up, beta), op.Mul(gate, op.Sigmoid(op.Mul(gate, alpha))))
        products = op.Add(op.MatMul(inner, down), op.Unsqueeze(down_bias, [1]))
        return op.ReduceSum(_weighted(op, products, zeros, chosen, weights), [0], keepdims=0)

    def clamped(self, op: Any, value: Any, low: Any, high: Any) -> Any:
        """The pattern of a value clamped to low .. high, or only to high."""
        return op.Clip(value, low, high)

    def check(
        self, _: Any, chosen: ir.Value, gate_up: ir.Value, down: ir.Value,
        alpha: ir.Value, beta: ir.Value, limit: ir.Value, low: ir.Value, high: ir.Value, **__: Any,
    ) -> MatchResult:  # fmt: skip
        result = _check(chosen, gate_up, down)
        if None in map(constant_number, (alpha, beta, limit)):
            return result.fail("The activation's numbers are not constant.", alpha)
        if constant_number(high) != constant_number(limit) or constant_number(low) != -(constant_number(limit) or 0.0):
            return result.fail("Gate and up are not clamped alike.", limit)
        return result

    def rewrite(
        self, op: Any, x: ir.Value, zeros: ir.Value, chosen: ir.Value, weights: ir.Value, gate_up: ir.Value, down: ir.Value,
        up_bias: ir.Value, down_bias: ir.Value, alpha: ir.Value, beta: ir.Value, limit: ir.Value, **_: Any,
    ) -> Any:  # fmt: skip
        parameters = (op.initializer(transposed_experts(gate_up)), up_bias, op.initializer(transposed_experts(down)), down_bias)
        return _mixture(
            op, x, zeros, chosen, weights, parameters,
            activation_alpha=constant_number(alpha), activation_beta=constant_number(beta), swiglu_limit=constant_number(limit),
        )  # fmt: skip


class NarrowBiasedExperts(BiasedExperts):
    """Clamping narrow floats is traced as Max and Min."""

    def clamped(self, op: Any, value: Any, low: Any, high: Any) -> Any:
        return op.Min(value if low is None else op.Max(value, low), high)


def _check(chosen: ir.Value, gate_up: ir.Value, down: ir.Value) -> MatchResult:
    result = MatchResult()
    if gate_up.const_value is None or down.const_value is None:
        return result.fail("The experts' weights are not constant.", gate_up)
    if chosen.shape is None or not isinstance(chosen.shape[1], int):
        return result.fail("How many experts a token has is not static.", chosen)
    return result


def _weighted(op: Any, products: Any, zeros: Any, chosen: Any, weights: Any) -> Any:
    """The pattern of every expert's product [E,T,H] times its weight, or 0 where it was not chosen."""
    expert_weights = op.Unsqueeze(op.Transpose(op.ScatterElements(zeros, chosen, weights, axis=1), perm=[1, 0]), [2])
    return op.Mul(products, expert_weights)


def _mixture(
    op: Any, x: ir.Value, zeros: ir.Value, chosen: ir.Value, weights: ir.Value, parameters: tuple[Any, ...], **activation: Any
) -> Any:
    """The MoE operator; `parameters` are W_gate_up [E,2I,H], its bias [E,2I], W_down [E,H,I] and its bias [E,H]."""
    expert_weights = op.ScatterElements(zeros, chosen, weights, axis=1)
    logits = op.Log(expert_weights)
    expert_weights.type = logits.type = weights.type
    assert chosen.shape is not None
    mixed = op.MoE(
        x, logits, *parameters, k=chosen.shape[1], activation_type="swiglu", swiglu_fusion=1, **activation,
        normalize_routing_weights=1, _domain=MS_DOMAIN,
    )  # fmt: skip
    return op.Mul(mixed, op.ReduceSum(weights, int64_constant_in_rule(op, 1), keepdims=1))


def constant_number(value: ir.Value) -> float | None:
    """The number in a constant of one element; None for any other value."""
    number: float | None = _ir_utils.get_singleton_value(value)
    return number


def _interleaved(gate_up: ir.Value) -> ir.LazyTensor:
    """A parameter [E,2I,H] with all gate rows before all up rows, reordered to gate, up, gate, up, .."""

    def interleave(weight: Array) -> Array:
        num_experts, doubled, width = weight.shape
        return weight.reshape(num_experts, 2, doubled // 2, width).swapaxes(1, 2).copy().reshape(weight.shape)

    return _rearranged(gate_up, "interleaved", interleave, (0, 1, 2))


def _as_own_gate(up: ir.Value) -> ir.LazyTensor:
    """A parameter [E,I,H] with each row repeated, as gate and up: [E,2I,H]."""
    return _rearranged(up, "twice", lambda weight: weight.repeat(2, axis=1), (0, 1, 2), size_factor=2)


def transposed_experts(parameter: ir.Value) -> ir.LazyTensor:
    """A parameter [E,K,N] transposed to [E,N,K]."""
    return _rearranged(parameter, "turned", lambda weight: weight.swapaxes(1, 2).copy(), (0, 2, 1))


def _rearranged(
    parameter: ir.Value, suffix: str, rearrange: Callable[[Array], Array], axes: tuple[int, ...], size_factor: int = 1
) -> ir.LazyTensor:
    """A parameter that `rearrange` rearranges each time it is read.

    Args:
        axes: for each axis of the result, the parameter's axis that it takes its size from.
        size_factor: factor on the size of the result's second axis.
    """
    tensor = parameter.const_value
    assert tensor is not None
    sizes, name = [tensor.shape.numpy()[axis] for axis in axes], f"{parameter.name}.{suffix}"
    sizes[1] *= size_factor

    def compute() -> ir.TensorProtocol:
        result = rearrange(tensor.numpy())
        release_pages(tensor)
        return ir.tensor(result, name=name)

    return ir.LazyTensor(compute, dtype=tensor.dtype, shape=ir.Shape(sizes), name=name)
