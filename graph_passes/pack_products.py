"""Merge products of the same rows into one.

    MatMul(x, W1), MatMul(x, W2), ..  ->  Split(MatMul(x, [W1 W2 ..]))

TensorRT does this by itself for float weights, but not for quantised ones: with these a step of two Llama layers takes 28
kernels, and 22 when packed, as many as in fp16 (TensorRT-RTX 1.7.1, its builder's list of kernels).
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from skipdecode.graph_passes.conventions import int64_constant_node, required_input, static_dim
from skipdecode.graph_passes.projection import join_parameters, matrix_parameter, multiply
from skipdecode.graph_passes.quantize_weights import is_router
from skipdecode.graph_passes.take_over import take_over

_Product = tuple[ir.Node, ir.Value]  # the product and its parameter


class PackProductsPass(ir.passes.InPlacePass):
    """Merges the products that share their rows. Biases stay behind the split.

    Declines products that share their rows with no other, and routers, which are not quantised.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        groups: dict[tuple[ir.Value, bool], list[_Product]] = {}
        for node in model.graph:
            found = matrix_parameter(node)
            if found is not None and node.op_type == "MatMul" and not is_router(node):
                parameter, transposed = found
                groups.setdefault((required_input(node), transposed), []).append((node, parameter))
        several = {key: group for key, group in groups.items() if len(group) > 1}
        for (source, transposed), group in several.items():
            _pack(model.graph, source, transposed, group)
        if several:
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, bool(several))


def _pack(graph: ir.Graph, source: ir.Value, transposed: bool, group: list[_Product]) -> None:
    """Replace the products in `group` by one. `transposed`: their parameters are stored [N,K]."""
    first, axis = group[0][0], 0 if transposed else 1
    packed = join_parameters(graph, [parameter for _, parameter in group], axis)
    product = multiply(graph, first, source, packed, transposed, None)
    sizes = int64_constant_node(*(static_dim(parameter, axis) for _, parameter in group))
    parts = ir.node("Split", [product, sizes.outputs[0]], {"axis": -1}, num_outputs=len(group))
    graph.insert_before(first, [sizes, parts])
    for (node, _), part in zip(group, parts.outputs, strict=True):
        take_over(node.outputs[0], part)
        graph.remove(node, safe=True)
