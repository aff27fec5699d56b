"""Make a weight that embedding and head share a graph input of both, so that they read one copy on a device.

    Gather(W, ids)                     ->      Gather(tied_weight, ids)
    MatMul(x [B,1,E], Transpose(W))    ->      Unsqueeze(Gemm(Squeeze(x, 1), tied_weight, transB=1)[:, :V], 1)

Gemm replaces Transpose and MatMul because an engine transposes its own weights once, at load, but an input in every step. The
input's rows are padded to a multiple of 8; the Slice is left out where V is one already.
"""

from __future__ import annotations

import onnx_ir as ir

from skipdecode import bindings
from skipdecode.graph_passes.conventions import add_constant


class ShareTiedWeightPass(ir.passes.InPlacePass):
    """Turns the parameter `name` [V,E] into a graph input. Declines graphs without it.

    A product with it must be of a single position.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        weight = graph.initializers.pop(self.name, None)
        if weight is None:
            return ir.passes.PassResult(model, False)
        assert weight.const_value is not None
        vocabulary, width = weight.const_value.shape.numpy()
        shape = ir.Shape([bindings.tied_rows(vocabulary), width])
        tied_input = ir.Value(name=bindings.TIED_WEIGHT, shape=shape, type=weight.type)
        graph.inputs.append(tied_input)
        ir.convenience.replace_all_uses_with(weight, tied_input)
        for transpose in [node for node in tied_input.consumers() if node.op_type == "Transpose"]:
            for node in list(transpose.outputs[0].consumers()):
                _multiply(graph, node, tied_input, vocabulary)
            graph.remove(transpose, safe=True)
        return ir.passes.PassResult(model, True)


def _multiply(graph: ir.Graph, node: ir.Node, weight: ir.Value, vocabulary: int) -> None:
    """Replace `node`, MatMul(x [B,1,E], transposed weight), by a Gemm with `weight`."""
    rows, axes = node.inputs[0], _constant(graph, "axes", 1)
    assert node.op_type == "MatMul" and rows is not None and rows.shape is not None and rows.shape[1] == 1
    flat = ir.node("Squeeze", [rows, axes])
    product = ir.node("Gemm", [flat.outputs[0], weight], {"transB": 1})
    nodes = [flat, product]
    if vocabulary != bindings.tied_rows(vocabulary):
        bounds = [_constant(graph, "start", 0), _constant(graph, "end", vocabulary)]
        nodes.append(ir.node("Slice", [product.outputs[0], *bounds, axes]))
    nodes.append(ir.node("Unsqueeze", [nodes[-1].outputs[0], axes]))
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, node.outputs, nodes[-1].outputs)


def _constant(graph: ir.Graph, name: str, number: int) -> ir.Value:
    return add_constant(graph, ir.tensor([number], dtype=ir.DataType.INT64, name=f"{bindings.TIED_WEIGHT}.{name}"))
