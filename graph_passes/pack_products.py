"""One product of several by the same rows.

    MatMul(x, W1), MatMul(x, W2), ..  ->  Split(MatMul(x, [W1 W2 ..]))

TensorRT does it by itself where the weights are floats, and not where they are quantised: a step of two Llama layers is 28
kernels then, packed 22, as many as in fp16 (TensorRT-RTX 1.7.1, its builder's list).
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from skipdecode.graph_passes.conventions import integers, required, static_dim
from skipdecode.graph_passes.projection import join_parameters, matrix_parameter, multiply
from skipdecode.graph_passes.quantize_weights import is_router
from skipdecode.graph_passes.take_over import take_over

_Found = tuple[ir.Node, ir.Value]  # the product and its parameter


class PackProductsPass(ir.passes.InPlacePass):
    """Leaves a product alone whose rows no other one takes, and routers, which are not quantised.

    Biases stay where they are, behind the split.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        groups: dict[tuple[ir.Value, bool], list[_Found]] = {}
        for node in model.graph:
            found = matrix_parameter(node)
            if found is not None and node.op_type == "MatMul" and not is_router(node):
                parameter, transposed = found
                groups.setdefault((required(node), transposed), []).append((node, parameter))
        several = {key: group for key, group in groups.items() if len(group) > 1}
        for (source, transposed), group in several.items():
            _pack(model.graph, source, transposed, group)
        if several:
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, bool(several))


def _pack(graph: ir.Graph, source: ir.Value, transposed: bool, group: list[_Found]) -> None:
    """`transposed`: the parameters are stored [N, K]."""
    first, axis = group[0][0], 0 if transposed else 1
    packed = join_parameters(graph, [parameter for _, parameter in group], axis)
    product = multiply(graph, first, source, packed, transposed, None)
    sizes = integers(*(static_dim(parameter, axis) for _, parameter in group))
    parts = ir.node("Split", [product, sizes.outputs[0]], {"axis": -1}, num_outputs=len(group))
    graph.insert_before(first, [sizes, parts])
    for (node, _), part in zip(group, parts.outputs, strict=True):
        take_over(node.outputs[0], part)
        graph.remove(node, safe=True)
