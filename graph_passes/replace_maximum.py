"""Replace maxima over the last axis by TopK.

    ReduceMax(x, axes [-1], keepdims=1)      ->      TopK(x, 1)
    ArgMax(x, axis=-1, keepdims=0)           ->      Squeeze(TopK(x, 1), [-1])

Why: maxima are all that ONNX Runtime's CUDA provider needs cuDNN for in a decoder, and its ArgMax does not support bf16.
"""

from __future__ import annotations

import onnx_ir as ir

from skipdecode.graph_passes.conventions import int64_constant_node, optional_input


class ReplaceMaximumPass(ir.passes.InPlacePass):
    """Replaces ReduceMax and ArgMax over the last axis. Declines maxima over other axes."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type in ("ReduceMax", "ArgMax") and _is_over_last_axis(node)]
        for node in found:
            _replace_by_top_k(model.graph, node)
        return ir.passes.PassResult(model, bool(found))


def _is_over_last_axis(node: ir.Node) -> bool:
    source, axes = node.inputs[0], optional_input(node, 1)
    if source is None or source.shape is None:
        return False
    if node.op_type == "ArgMax":
        reduced_axes = [node.attributes.get_int("axis", default=0)]
    else:
        reduced_axes = axes.const_value.numpy().tolist() if axes is not None and axes.const_value is not None else []
    return reduced_axes in ([-1], [len(source.shape) - 1])


def _replace_by_top_k(graph: ir.Graph, node: ir.Node) -> None:
    one, last = int64_constant_node(1), int64_constant_node(-1)
    top = ir.node("TopK", [node.inputs[0], one.outputs[0]], {"axis": -1}, num_outputs=2)
    nodes, made = [one, top], top.outputs[0 if node.op_type == "ReduceMax" else 1]
    if not node.attributes.get_int("keepdims", default=1):
        nodes += [last, ir.node("Squeeze", [made, last.outputs[0]])]
        made = nodes[-1].outputs[0]
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, node.outputs, [made])
