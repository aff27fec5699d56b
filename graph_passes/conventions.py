"""Conventions that the passes share: opset and operator domain, narrow floats, norms, operators with states, what counts as a
weight; and helpers that add constants and casts or read inputs, producers and sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

OPSET = 24  # of standard graphs: Attention with a static KV buffer and TensorScatter need it
MS_DOMAIN = "com.microsoft"  # of ONNX Runtime's own operators
NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
TO_THE_END = (1 << 63) - 1  # `ends` of a Slice that runs to the end of its axis
NORMS = ("RMSNormalization", "LayerNormalization")
WITH_STATES = ("LinearAttention", "CausalConvWithState")


def is_parameter(value: ir.Value) -> bool:
    """Whether an initializer is a weight of the checkpoint (its name is dotted) and not a constant of the tracer."""
    return "." in (value.name or "")


def add_constant(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Add an initializer of the tensor's name, which must be new to the graph."""
    shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
    value = ir.Value(name=tensor.name, shape=shape, type=kind, const_value=tensor)
    graph.register_initializer(value)
    return value


def int64_constant_node(*numbers: int) -> ir.Node:
    """A Constant, int64 [len(numbers)], not yet in any graph."""
    return ir.node("Constant", [], {"value": ir.tensor(np.array(numbers, dtype=np.int64))})


def int64_constant(tape: Tape, *numbers: int) -> ir.Value:
    """The same Constant as a new node on a tape."""
    return tape.op("Constant", [], {"value_ints": [*numbers]})


def int64_constant_in_rule(op: Any, *numbers: int) -> Any:
    """The same Constant in a rewrite rule's replacement."""
    return op.Constant(value_ints=[*numbers])


def slice_along(tape: Tape, value: ir.Value, axis: int, start: int, end: int = TO_THE_END) -> ir.Value:
    """A value's elements from `start` to `end` along an axis, as new nodes on a tape."""
    return tape.op("Slice", [value, *(int64_constant(tape, bound) for bound in (start, end, axis))])


def cast_node(value: ir.Value, to: ir.DataType) -> ir.Node:
    """A Cast, not yet in any graph."""
    node = ir.node("Cast", [value], {"to": to})
    node.outputs[0].shape, node.outputs[0].type = value.shape, ir.TensorType(to)
    return node


def is_cast_to(node: ir.Node, to: ir.DataType) -> bool:
    """Whether the node is a Cast to that type."""
    return node.op_type == "Cast" and node.attributes["to"].as_int() == to


def producer(value: ir.Value | None) -> ir.Node | None:
    """The node that makes a value; None where no node does or there is no value."""
    return value.producer() if value is not None else None


def uncast(value: ir.Value | None) -> ir.Value | None:
    """The value before all casts that lead to `value`; itself where it is not cast."""
    node = producer(value)
    return uncast(node.inputs[0]) if node is not None and node.op_type == "Cast" else value


def required_input(node: ir.Node, index: int = 0) -> ir.Value:
    """An input that the operator must have."""
    value = node.inputs[index]
    assert value is not None, f"{node.op_type} without its input {index}"
    return value


def optional_input(node: ir.Node, index: int) -> ir.Value | None:
    """An input that may be missing, at the end or in between."""
    return node.inputs[index] if index < len(node.inputs) else None


def single_consumer(value: ir.Value, op_type: str) -> ir.Node:
    """The only node that reads `value`, of that type."""
    (node,) = value.consumers()
    assert node.op_type == op_type, f"{value.name} is not read by {op_type}"
    return node


def inputs_by_name(graph: ir.Graph | ir.Function) -> dict[str | None, ir.Value]:
    """The graph's inputs, by name."""
    return {value.name: value for value in graph.inputs}


def scales_last_axis_only(norm: ir.Node) -> bool:
    """Whether a norm's scale and bias are [D]: of the last axis only, not also of heads or groups."""
    return all(value is None or (value.shape is not None and len(value.shape) == 1) for value in norm.inputs[1:])


def norm_with_unit_scale(tape: Tape, norm: ir.Node, rows: ir.Value) -> ir.Value:
    """`norm` applied to `rows` [..,D] with a scale of ones [D] and without a bias."""
    size, kind = static_dim(rows, -1), required_input(norm, 1).dtype
    ones = tape.op("Constant", [], {"value": ir.tensor([1.0] * size, dtype=kind)})
    ones.shape, ones.type = ir.Shape([size]), required_input(norm, 1).type
    normed = tape.op(norm.op_type, [rows, ones], norm.attributes)
    normed.shape, normed.type = rows.shape, rows.type
    return normed


def static_dim(value: ir.Value, axis: int) -> int:
    """The size of a dimension that must be static."""
    size = value.shape[axis] if value.shape is not None else None
    assert isinstance(size, int), f"{value.name}: dimension {axis} is not static"
    return size
