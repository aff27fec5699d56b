"""Recognise linear layers in a graph, and build parameters by joining or reordering existing ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from skipdecode.graph_passes.conventions import add_constant, is_parameter, required_input
from skipdecode.graph_passes.mapped import release_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """`source` [B,S,K] times `weight`, plus `bias`, times `factor`."""

    source: ir.Value  # x
    weight: ir.Value
    transposed: bool  # stored [N,K]
    bias: ir.Value | None
    factor: float


def find_projection(value: ir.Value | None) -> Projection | None:
    """`value` as MatMul(source, weight) [+ bias] [* factor] with a single reader at each step; None if it is not one."""
    factor, bias = 1.0, None
    node = _sole_producer(value)
    if node is not None and node.op_type == "Mul":
        number = node.inputs[1].const_value if node.inputs[1] is not None else None
        if number is None or number.size != 1:
            return None
        factor, node = float(number.numpy().item()), _sole_producer(node.inputs[0])
    if node is not None and node.op_type == "Add":
        parts = _rows_and_bias(node)
        if parts is None:
            return None
        node, bias = _sole_producer(parts[0]), parts[1]
    found = matrix_parameter(node) if node is not None and node.op_type == "MatMul" else None
    if node is None or found is None:
        return None
    weight, transposed = found
    return Projection(source=required_input(node), weight=weight, transposed=transposed, bias=bias, factor=factor)


def matrix_parameter(node: ir.Node) -> tuple[ir.Value, bool] | None:
    """The two-dimensional parameter that the node multiplies by, and whether it is stored [N,K] (outputs, inputs)."""
    if node.op_type not in ("MatMul", "Gemm") or node.domain != "" or node.inputs[1] is None:
        return None
    transposed_rows, transposed = (node.attributes.get_int(name, default=0) == 1 for name in ("transA", "transB"))
    if transposed_rows or [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")] != [1, 1]:
        return None
    value, producer = node.inputs[1], node.inputs[1].producer()
    if producer is not None and producer.op_type == "Transpose" and producer.inputs[0] is not None:
        value, transposed = producer.inputs[0], not transposed
    if value.const_value is None or not is_parameter(value) or len(value.const_value.shape) != 2:
        return None
    return value, transposed


def separate_bias(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """The rows and the bias [N] whose sum is `value`; None if it is not such a sum, or has more than one reader."""
    add = _sole_producer(value)
    return _rows_and_bias(add) if add is not None and add.op_type == "Add" else None


def _rows_and_bias(add: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    for rows, bias in (add.inputs, add.inputs[::-1]):
        if rows is not None and bias is not None and bias.is_initializer() and bias.const_value is not None:
            return (rows, bias) if len(bias.const_value.shape) == 1 else None
    return None


def _sole_producer(value: ir.Value | None) -> ir.Node | None:
    return value.producer() if value is not None and len(value.uses()) == 1 and not value.is_graph_output() else None


def multiply(
    graph: ir.Graph, before: ir.Node, source: ir.Value, weight: ir.Value, transposed: bool, bias: ir.Value | None
) -> ir.Value:
    """Add nodes for `source` [B,S,K] times `weight` (`transposed`: stored [N,K]), plus `bias`, in front of `before`."""
    tape = Tape()
    product = tape.op("MatMul", [source, tape.op("Transpose", [weight], {"perm": [1, 0]}) if transposed else weight])
    rows = product if bias is None else tape.op("Add", [product, bias])
    graph.insert_before(before, tape.nodes)
    return rows


def join_parameters(graph: ir.Graph, values: list[ir.Value], axis: int) -> ir.Value:
    """A parameter that concatenates `values` along `axis`."""
    tensors = [value.const_value for value in values if value.const_value is not None]
    sizes = list(tensors[0].shape.numpy())
    sizes[axis] = sum([tensor.shape.numpy()[axis] for tensor in tensors])
    join = partial(np.concatenate, axis=axis)
    return _lazy_parameter(graph, f"{values[0].name}.packed", sizes, tensors, join)


def reorder_parameter(graph: ir.Graph, value: ir.Value, order: np.ndarray[tuple[int], np.dtype[np.int64]], axis: int) -> ir.Value:
    """A parameter with the rows (axis 0) or columns (axis 1) of `value` reordered: the i-th is `order[i]` of `value`."""
    assert value.const_value is not None
    tensor = value.const_value
    return _lazy_parameter(
        graph, f"{value.name}.ordered", list(tensor.shape.numpy()), [tensor], lambda arrays: np.take(arrays[0], order, axis)
    )


def slice_parameter(graph: ir.Graph, value: ir.Value, start: int, end: int, axis: int) -> ir.Value:
    """A parameter with rows (axis 0) or columns (axis 1) `start` to `end` of `value`."""
    assert value.const_value is not None
    tensor, chosen = value.const_value, (slice(None),) * axis + (slice(start, end),)
    sizes = list(tensor.shape.numpy())
    sizes[axis] = end - start
    return _lazy_parameter(graph, f"{value.name}.from_{start}", sizes, [tensor], lambda arrays: arrays[0][chosen].copy())


def _lazy_parameter(
    graph: ir.Graph,
    name: str,
    sizes: list[int],
    tensors: list[ir.TensorProtocol],
    combine: Callable[[list[np.ndarray[Any, np.dtype[Any]]]], np.ndarray[Any, np.dtype[Any]]],
) -> ir.Value:
    """A parameter computed from `tensors` each time it is read; it holds no memory in between."""

    def compute() -> ir.TensorProtocol:
        result = combine([tensor.numpy() for tensor in tensors])
        release_pages(*tensors)
        return ir.tensor(result, name=name)

    return add_constant(graph, ir.LazyTensor(compute, dtype=tensors[0].dtype, shape=ir.Shape(sizes), name=name))
