"""Drop products that sum over 0 numbers: shared experts of a model that has none (DeepSeek-V3's kind with `n_shared_experts` 0).

    y + Reshape(MatMul(x [..,0], weight [0,N]))      ->      y

Why: the weights are empty tensors, which a checkpoint may leave out and onnx-ir cannot read from a file.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from skipdecode.graph_passes.conventions import producer
from skipdecode.graph_passes.take_over import can_take_over, same_shape, take_over


class DropEmptyProductsPass(ir.passes.InPlacePass):
    """Replaces a sum with an empty product by its other summand.

    Declines where the other summand does not have the shape of the sum, as a bias does not.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        changed = False
        for node in list(model.graph):
            other = _other_summand(node)
            if other is not None and same_shape(other, node.outputs[0]) and can_take_over(node.outputs[0], other):
                take_over(node.outputs[0], other)
                changed = True
        if changed:
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, changed)


def _other_summand(node: ir.Node) -> ir.Value | None:
    """The other summand of a sum with an empty product; None where `node` is not such a sum."""
    if node.op_type != "Add" or node.domain != "":
        return None
    left, right = node.inputs
    return right if _is_empty_product(left) else left if _is_empty_product(right) else None


def _is_empty_product(value: ir.Value | None) -> bool:
    node = producer(value)
    if node is not None and node.op_type == "Reshape":
        return _is_empty_product(node.inputs[0])
    if node is None or node.op_type != "MatMul" or node.inputs[0] is None:
        return False
    shape = node.inputs[0].shape
    return shape is not None and shape[-1] == 0
