"""Compute a softmax in fp32 where the model asks for that: the tracer casts its result, torch its input.

    Cast(Softmax(x fp16), FLOAT)  ->  Softmax(Cast(x, FLOAT))

Why: torch's `softmax(x, dtype=torch.float)` is how the routers of Qwen2-MoE and others are written. From narrow shares they
could choose other experts (`torch.softmax`: "the input tensor is casted to dtype before the operation is performed").
"""

from __future__ import annotations

import onnx_ir as ir

from skipdecode.graph_passes.conventions import NARROW, cast_node, is_cast_to, required_input
from skipdecode.graph_passes.take_over import take_over


class WidenSoftmaxPass(ir.passes.InPlacePass):
    """Casts the input of each Softmax in a narrow type of which only casts to fp32 read the result, and removes those."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type == "Softmax" and _is_widened(node)]
        for node in found:
            _widen(model.graph, node)
        return ir.passes.PassResult(model, bool(found))


def _is_widened(softmax: ir.Node) -> bool:
    shares = softmax.outputs[0]
    readers = list(shares.consumers())
    return (
        required_input(softmax).dtype in NARROW
        and not shares.is_graph_output()
        and bool(readers)
        and all(is_cast_to(reader, ir.DataType.FLOAT) for reader in readers)
    )


def _widen(graph: ir.Graph, node: ir.Node) -> None:
    widened = cast_node(required_input(node), ir.DataType.FLOAT)
    graph.insert_before(node, widened)
    node.replace_input_with(0, widened.outputs[0])
    shares = node.outputs[0]
    for cast in [*shares.consumers()]:
        take_over(cast.outputs[0], shares)
        graph.remove(cast, safe=True)
