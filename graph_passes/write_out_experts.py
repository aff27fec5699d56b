"""Write out mixtures of experts for TensorRT, which has no operator for them, so that a step reads only the chosen experts.

    experts(x [B*S,H], chosen [B*S,K], weights [B*S,K]), in a graph whose hidden state is [B,S,..]
    ->  each row's first token: the matrices of its K experts, looked up, times x elementwise and summed over the inputs
        its other tokens: every expert's product, times its weight or 0, as traced

Why: TensorRT-RTX 1.7.1 fuses a look-up, an elementwise product and a sum into one kernel, which reads the chosen matrices in
place. For a MatMul it would first copy what was looked up. Its builder knows that a step has no other tokens, which leaves three
kernels behind the router. A prompt reads all experts anyway; here it is also multiplied by all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from skipdecode import bindings
from skipdecode.graph_passes.apply_rules import apply_rules
from skipdecode.graph_passes.conventions import TO_THE_END, inputs_by_name, int64_constant_in_rule, is_parameter, static_dim
from skipdecode.graph_passes.lower_experts import (
    BiasedExperts,
    Experts,
    GeluExperts,
    NarrowBiasedExperts,
    SquaredExperts,
    TurnedExperts,
    constant_number,
    transposed_experts,
)

READ_FRACTION = "read share"  # key in a parameter's `meta`: the fraction of it that a step of one row reads
# (op, product with `up` [..,N], its dtype) -> [..,I]
Activation = Callable[[Any, Any, ir.DataType], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Weights and biases of all experts."""

    up: ir.Value  # [E,N,H]
    down: ir.Value  # [E,H,I]
    up_bias: ir.Value | None = None  # [E,N]
    down_bias: ir.Value | None = None  # [E,H]


class WriteOutExpertsPass(ir.passes.InPlacePass):
    """Writes out mixtures as the exporter traces them (`exporter.experts`)."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        kinds = (_Experts, _GeluExperts, _TurnedExperts, _SquaredExperts, _BiasedExperts, _NarrowBiasedExperts)
        return ir.passes.PassResult(model, apply_rules(model, *(kind.rule() for kind in kinds)))

    def ensures(self, model: ir.Model) -> None:
        left = [
            value.name
            for value in model.graph.initializers.values()
            if is_parameter(value) and len(value.shape or ()) == 3 and _has_product_with_all_experts(value)
        ]
        if left:
            raise ir.passes.PostconditionError(f"experts of which a step reads all: {left}")


def _has_product_with_all_experts(value: ir.Value) -> bool:
    readers = {node.op_type for node in value.consumers()}
    return bool(readers & {"Transpose", "MatMul"}) and "Gather" not in readers


class _Experts(Experts):
    def rewrite(
        self, op: Any, x: ir.Value, zeros: ir.Value, chosen: ir.Value, weights: ir.Value, gate_up: ir.Value, down: ir.Value
    ) -> Any:
        return _mixture(op, x, zeros, chosen, weights, _Weights(up=gate_up, down=down), self.inner)

    def inner(self, op: Any, gate_and_up: Any, _: ir.DataType) -> Any:
        gate, up = op.Split(gate_and_up, axis=-1, num_outputs=2, _outputs=2)
        return op.Mul(self.activated(op, gate), up)


class _GeluExperts(GeluExperts, _Experts):
    """The pattern of `GeluExperts` with the rewrite of `_Experts`."""


class _TurnedExperts(TurnedExperts, _Experts):
    """Transposes the matrices, then rewrites like `_Experts`."""


class _SquaredExperts(SquaredExperts):
    def rewrite(
        self, op: Any, x: ir.Value, zeros: ir.Value, chosen: ir.Value, weights: ir.Value, up: ir.Value, down: ir.Value
    ) -> Any:
        return _mixture(op, x, zeros, chosen, weights, _Weights(up=up, down=down), _squared_relu)


class _BiasedExperts(BiasedExperts):
    def rewrite(
        self, op: Any, x: ir.Value, zeros: ir.Value, chosen: ir.Value, weights: ir.Value, gate_up: ir.Value, down: ir.Value,
        up_bias: ir.Value, down_bias: ir.Value, alpha: ir.Value, beta: ir.Value, limit: ir.Value, **_: Any,
    ) -> Any:  # fmt: skip
        up, down = (op.initializer(transposed_experts(matrices)) for matrices in (gate_up, down))
        experts = _Weights(up=up, down=down, up_bias=up_bias, down_bias=down_bias)
        numbers = (constant_number(alpha) or 0.0, constant_number(beta) or 0.0, constant_number(limit) or 0.0)
        return _mixture(
            op, x, zeros, chosen, weights, experts, lambda op, gate_and_up, kind: _clamped(op, gate_and_up, kind, *numbers)
        )


class _NarrowBiasedExperts(_BiasedExperts):
    clamped = NarrowBiasedExperts.clamped


def _mixture(
    op: Any, x: ir.Value, zeros: ir.Value, chosen: ir.Value, weights: ir.Value, experts: _Weights, activation: Activation
) -> Any:
    node, kind = x.producer(), experts.up.dtype
    assert node is not None and node.graph is not None and kind is not None
    hidden = inputs_by_name(node.graph)[bindings.HIDDEN]  # [B,S,..], with the same tokens as x
    for parameter in (experts.up, experts.down, experts.up_bias, experts.down_bias):
        if parameter is not None:
            parameter.meta[READ_FRACTION] = static_dim(chosen, 1) / static_dim(parameter, 0)
    tokens_shape = op.Concat(op.Shape(hidden, start=0, end=2), int64_constant_in_rule(op, -1), axis=0)
    values = [op.Reshape(value, tokens_shape) for value in (x, zeros, chosen, weights)]
    first_token = [op.Slice(value, *(int64_constant_in_rule(op, bound) for bound in (0, 1, 1))) for value in values]
    other_tokens = [op.Slice(value, *(int64_constant_in_rule(op, bound) for bound in (1, TO_THE_END, 1))) for value in values]
    parts = (
        _apply_chosen_experts(op, first_token, experts, activation, kind),
        _apply_all_experts(op, other_tokens, experts, activation, kind),
    )
    return op.Reshape(op.Concat(*parts, axis=1), op.Shape(x))


def _apply_chosen_experts(op: Any, values: list[Any], experts: _Weights, activation: Activation, kind: ir.DataType) -> Any:
    """Rows [B,1,H], zeros, `chosen` experts [B,1,K] and their weights [B,1,K] -> [B,1,H]. Computed in fp32."""
    rows, _, chosen, weights = values
    chosen_of_row = op.Squeeze(chosen, int64_constant_in_rule(op, 1))

    def product(numbers: Any, matrices: ir.Value, bias: ir.Value | None) -> Any:
        """[B,K,inputs], or [B,1,inputs] -> [B,K,outputs]."""
        products = op.Mul(_wide(op, op.Gather(matrices, chosen_of_row)), op.Unsqueeze(numbers, int64_constant_in_rule(op, 2)))
        summed = op.ReduceSum(products, int64_constant_in_rule(op, 3), keepdims=0)
        return summed if bias is None else op.Add(summed, _wide(op, op.Gather(bias, chosen_of_row)))

    inner = activation(op, product(_wide(op, rows), experts.up, experts.up_bias), ir.DataType.FLOAT)
    expert_weights = op.Transpose(_wide(op, weights), perm=[0, 2, 1])
    mixed = op.Mul(product(inner, experts.down, experts.down_bias), expert_weights)
    return op.Cast(op.ReduceSum(mixed, int64_constant_in_rule(op, 1)), to=kind)


def _apply_all_experts(op: Any, values: list[Any], experts: _Weights, activation: Activation, kind: ir.DataType) -> Any:
    """Rows [B,R,H], zeros [B,R,E], `chosen` experts [B,R,K] and their weights [B,R,K] -> [B,R,H]."""
    rows, zeros, chosen, weights = values

    def product(numbers: Any, matrices: ir.Value, bias: ir.Value | None) -> Any:
        """[B,E,R,inputs], or [B,1,R,inputs] -> [B,E,R,outputs]."""
        products = op.MatMul(numbers, op.Transpose(matrices, perm=[0, 2, 1]))
        return products if bias is None else op.Add(products, op.Unsqueeze(bias, int64_constant_in_rule(op, 1)))

    inner = activation(op, product(op.Unsqueeze(rows, int64_constant_in_rule(op, 1)), experts.up, experts.up_bias), kind)
    expert_weights = op.Transpose(op.ScatterElements(zeros, chosen, weights, axis=2), perm=[0, 2, 1])
    expert_weights = op.Unsqueeze(expert_weights, int64_constant_in_rule(op, 3))
    zero = op.Constant(value=ir.tensor(np.array(0, dtype=kind.numpy()), dtype=kind))
    mixed = op.Mul(product(inner, experts.down, experts.down_bias), expert_weights)
    # an expert that was not chosen may overflow in fp16, and 0 times infinity is NaN
    return op.ReduceSum(op.Where(op.Equal(expert_weights, zero), zero, mixed), int64_constant_in_rule(op, 1), keepdims=0)


def _squared_relu(op: Any, up: Any, _: ir.DataType) -> Any:
    positive = op.Relu(up)
    return op.Mul(positive, positive)


def _clamped(op: Any, gate_and_up: Any, kind: ir.DataType, alpha: float, beta: float, limit: float) -> Any:
    """gpt-oss's activation of alternating gate, up, ..: (up + beta) * gate * Sigmoid(alpha * gate), after clamping.

    Gate is at most `limit`, up within -`limit` and `limit`.
    """

    def number(value: float) -> Any:
        return op.Constant(value=ir.tensor(np.array(value, dtype=kind.numpy()), dtype=kind))

    gate, up = (
        op.Slice(gate_and_up, *(int64_constant_in_rule(op, bound) for bound in (offset, TO_THE_END, -1, 2))) for offset in (0, 1)
    )
    gate, up = op.Min(gate, number(limit)), op.Max(op.Min(up, number(limit)), number(-limit))
    return op.Mul(op.Add(up, number(beta)), op.Mul(gate, op.Sigmoid(op.Mul(gate, number(alpha)))))


def _wide(op: Any, value: Any) -> Any:
    return op.Cast(value, to=ir.DataType.FLOAT)
