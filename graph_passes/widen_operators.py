"""Compute operators in fp32 where ONNX Runtime's CUDA provider has no bf16 kernel; fp32 holds every bf16 number.

    Log(x bf16)      ->      Cast(Log(Cast(x)))

All of these operators have fp16 kernels.
"""

from __future__ import annotations

import onnx_ir as ir

from skipdecode.graph_passes.conventions import cast_node
from skipdecode.graph_passes.take_over import take_over

_WITHOUT_BF16 = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Log", "Pad")  # in 1.31.1, of those that decoders use


class WidenOperatorsPass(ir.passes.InPlacePass):
    """Puts casts around each operator without a bf16 kernel. Declines operators whose first input is not bf16."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type in _WITHOUT_BF16 and _is_bf16(node.inputs[0])]
        for node in found:
            _widen(model.graph, node)
        return ir.passes.PassResult(model, bool(found))


def _is_bf16(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.BFLOAT16


def _widen(graph: ir.Graph, node: ir.Node) -> None:
    for index, value in enumerate(node.inputs):
        if value is not None and _is_bf16(value):
            widened = cast_node(value, ir.DataType.FLOAT)
            graph.insert_before(node, widened)
            node.replace_input_with(index, widened.outputs[0])
    made = node.outputs[0]
    if _is_bf16(made):
        narrowed = cast_node(made, ir.DataType.BFLOAT16)
        graph.insert_after(node, narrowed)
        take_over(made, narrowed.outputs[0])  # replaces the Cast's own input, too: the next line restores it
        narrowed.replace_input_with(0, made)
        made.type = ir.TensorType(ir.DataType.FLOAT)
