"""What the passes agree on: whose operators are not standard, which floats are narrow, which operators are norms or keep
states, which initializers are weights; how constants are added, values cast, inputs, producers and sizes read."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

OPSET = 24  # of standard graphs: Attention with a static KV buffer and TensorScatter need it
MS_DOMAIN = "com.microsoft"  # of the operators that ONNX Runtime has beside the standard ones
NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
TO_THE_END = (1 << 63) - 1  # where a slice ends that leaves nothing behind it
NORMS = ("RMSNormalization", "LayerNormalization")
WITH_STATES = ("LinearAttention", "CausalConvWithState")


def is_parameter(value: ir.Value) -> bool:
    """Whether an initializer is a weight of the checkpoint (its name is dotted) and not a constant of the tracer."""
    return "." in (value.name or "")


def add_constant(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """An initializer of the tensor's name, which the graph has not got yet."""
    shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
    value = ir.Value(name=tensor.name, shape=shape, type=kind, const_value=tensor)
    graph.register_initializer(value)
    return value


def integers(*numbers: int) -> ir.Node:
    """A Constant, int64 [len(numbers)], that is in no graph yet."""
    return ir.node("Constant", [], {"value": ir.tensor(np.array(numbers, dtype=np.int64))})


def constant(tape: Tape, *numbers: int) -> ir.Value:
    """The same as a new node of a tape's."""
    return tape.op("Constant", [], {"value_ints": [*numbers]})


def rule_constant(op: Any, *numbers: int) -> Any:
    """The same in what a rewrite rule puts in a pattern's place."""
    return op.Constant(value_ints=[*numbers])


def cast(value: ir.Value, to: ir.DataType) -> ir.Node:
    """A Cast that is in no graph yet."""
    node = ir.node("Cast", [value], {"to": to})
    node.outputs[0].shape, node.outputs[0].type = value.shape, ir.TensorType(to)
    return node


def producer(value: ir.Value | None) -> ir.Node | None:
    """The node that makes a value; None: none does, or there is no value."""
    return value.producer() if value is not None else None


def uncast(value: ir.Value | None) -> ir.Value | None:
    """What stands before casts."""
    node = producer(value)
    return uncast(node.inputs[0]) if node is not None and node.op_type == "Cast" else value


def required(node: ir.Node, index: int = 0) -> ir.Value:
    """An input that the operator cannot be without."""
    value = node.inputs[index]
    assert value is not None, f"{node.op_type} without its input {index}"
    return value


def optional(node: ir.Node, index: int) -> ir.Value | None:
    """An input that may be left out, at the end or in between."""
    return node.inputs[index] if index < len(node.inputs) else None


def inputs_by_name(graph: ir.Graph | ir.Function) -> dict[str | None, ir.Value]:
    """The graph's inputs."""
    return {value.name: value for value in graph.inputs}


def scales_numbers(norm: ir.Node) -> bool:
    """Whether scale and bias of a norm are [D], of the last axis alone: not of heads or groups, too."""
    return all(value is None or (value.shape is not None and len(value.shape) == 1) for value in norm.inputs[1:])


def by_ones(tape: Tape, norm: ir.Node, rows: ir.Value) -> ir.Value:
    """`norm` of `rows` [..,D] with ones [D] in the place of its scale, and without a bias."""
    size, kind = static_dim(rows, -1), required(norm, 1).dtype
    ones = tape.op("Constant", [], {"value": ir.tensor([1.0] * size, dtype=kind)})
    ones.shape, ones.type = ir.Shape([size]), required(norm, 1).type
    normed = tape.op(norm.op_type, [rows, ones], norm.attributes)
    normed.shape, normed.type = rows.shape, rows.type
    return normed


def static_dim(value: ir.Value, axis: int) -> int:
    """A size that is known when the graph is made."""
    size = value.shape[axis] if value.shape is not None else None
    assert isinstance(size, int), f"{value.name}: dimension {axis} is not static"
    return size
