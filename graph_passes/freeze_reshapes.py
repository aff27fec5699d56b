"""Give Reshapes whose target shape is computed at run time a constant one: 0 copies a dimension, -1 infers the one left.

    Reshape(x [B,S,64], Concat(Shape(x)[0], Shape(x)[1], 4, 16)) -> Reshape(x, [0, 0, 4, 16])
    Reshape(x) to the shape that x has                           -> x
    Reshape(x [B*S,64], Concat(B, S, 64)), hidden being [B,S,64] -> Reshape(x, Shape(hidden))

Why: each layer loses a handful of tiny operators. They compute next to nothing, yet cost 2 us each on a CPU, and ONNX Runtime's
CUDA provider leaves them to the CPU.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from skipdecode.graph_passes.conventions import int64_constant_node
from skipdecode.graph_passes.take_over import can_take_over, same_shape, take_over


class FreezeReshapesPass(ir.passes.InPlacePass):
    """Makes target shapes constant, or takes them from a graph input.

    Declines where no graph input has the result's shape and two or more dimensions are neither static nor x's on that axis.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        changed = False
        for node in list(model.graph):
            source, old = node.inputs[0] if node.inputs else None, node.outputs[0]
            if source is not None and node.op_type == "Reshape" and same_shape(source, old) and can_take_over(old, source):
                take_over(old, source)
            elif _has_computed_shape(node) and (target := _target_shape(model.graph, node)) is not None:
                model.graph.insert_before(node, target)
                node.replace_input_with(1, target.outputs[0])
                node.attributes.pop("allowzero", None)  # torch sets it, and with it a 0 is a size
            else:
                continue
            changed = True
        if changed:
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, changed)


def _has_computed_shape(node: ir.Node) -> bool:
    """Whether `node` is a Reshape whose target shape other operators compute."""
    if node.op_type != "Reshape" or node.domain != "" or node.inputs[0] is None or node.inputs[1] is None:
        return False
    producer = node.inputs[1].producer()
    return producer is not None and producer.op_type not in ("Constant", "Shape") and node.inputs[1].const_value is None


def _target_shape(graph: ir.Graph, node: ir.Node) -> ir.Node | None:
    """A node that makes a Reshape's target shape: a Constant, or the Shape of a graph input with the same shape."""
    sizes = _constant_sizes(node)
    if sizes is not None:
        return int64_constant_node(*sizes)
    same_shape_input = next((value for value in graph.inputs if same_shape(node.outputs[0], value)), None)
    return None if same_shape_input is None else ir.node("Shape", [same_shape_input])


def _constant_sizes(node: ir.Node) -> list[int] | None:
    source, made = node.inputs[0].shape if node.inputs[0] is not None else None, node.outputs[0].shape
    if source is None or made is None:
        return None
    sizes = [_size(source, made, axis) for axis in range(len(made))]
    return sizes if sizes.count(-1) <= 1 else None


def _size(source: ir.Shape, made: ir.Shape, axis: int) -> int:
    size = made[axis]
    if isinstance(size, int):
        return size
    return 0 if axis < len(source) and size.value is not None and source[axis] == size else -1
