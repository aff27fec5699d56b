"""Split the product in front of a short convolution into one product for each of the things that it yields.

    Split(MatMul(x, Transpose(W)), sizes)  ->  MatMul(x, Transpose(W[part])) for each part

Why: TensorRT-RTX 1.7.1 does so by itself for a prompt but not for a step, and then its plan holds the matrix twice, in two orders
(Mamba-2's `in_proj`, two thirds of a layer). Separate products it merges again, for both in the same order.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from skipdecode.graph_passes.conventions import required_input, static_dim
from skipdecode.graph_passes.projection import matrix_parameter, multiply, slice_parameter
from skipdecode.graph_passes.take_over import take_over


class SplitProductsPass(ir.passes.InPlacePass):
    """Splits products with a parameter that only a Split along the last axis reads, and a part of them CausalConvWithState.

    Declines other products, such as packed queries, keys and values, whose matrix plans hold once.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        convolutions = [node for node in model.graph if node.op_type == "CausalConvWithState"]
        splits = dict.fromkeys(_made_by(required_input(node)) for node in convolutions)
        found = [(split, parameter) for split in splits if split is not None and (parameter := _parameter(split)) is not None]
        for split, parameter in found:
            _split(model.graph, split, *parameter)
        if found:
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, bool(found))


def _made_by(value: ir.Value) -> ir.Node | None:
    """What makes a convolution's input, before casts and transpositions."""
    node = value.producer()
    while node is not None and node.op_type in ("Cast", "Transpose"):
        node = required_input(node).producer()
    return node


def _parameter(split: ir.Node) -> tuple[ir.Value, bool] | None:
    """The parameter that the split product multiplies by, and whether it is stored [N,K]; None: it splits something else."""
    rows = required_input(split)
    product, rank = rows.producer(), len(rows.shape or ())
    is_last = split.op_type == "Split" and rank > 0 and split.attributes.get_int("axis", 0) in (-1, rank - 1)
    if product is None or product.op_type != "MatMul" or not is_last or len(list(rows.consumers())) != 1:
        return None
    return matrix_parameter(product)


def _split(graph: ir.Graph, split: ir.Node, parameter: ir.Value, transposed: bool) -> None:
    product, end = required_input(split).producer(), 0
    assert product is not None
    for output in split.outputs:
        start, end = end, end + static_dim(output, len(output.shape or ()) - 1)
        part = slice_parameter(graph, parameter, start, end, 0 if transposed else 1)
        take_over(output, multiply(graph, split, required_input(product), part, transposed, None))
    graph.remove(split, safe=True)
