"""Replace a Gather of one constant index by a Slice.

    Gather <axis = 3> (x [B,S,H,3,D], 1)  ->  Squeeze(Slice(x, 1, 2), 3)

Why: where quantised weights yield query, key and value side by side and norms follow (Persimmon), TensorRT-RTX 1.7.1's builder
crashes with signal 11 on the Gather but builds the Slice.
"""

from __future__ import annotations

import onnx_ir as ir

from skipdecode.graph_passes.conventions import TO_THE_END, int64_constant_node, required_input


class SliceGathersPass(ir.passes.InPlacePass):
    """Replaces each Gather of one constant index.

    Declines look-ups in initializers or graph inputs, and indices that are not a constant scalar.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [(node, index) for node in model.graph if (index := _constant_index(node)) is not None]
        for node, index in found:
            axis = int64_constant_node(node.attributes.get_int("axis", 0))
            bounds = [int64_constant_node(index), int64_constant_node(TO_THE_END if index == -1 else index + 1)]
            start, end, along = (each.outputs[0] for each in (*bounds, axis))
            part = ir.node("Slice", [required_input(node), start, end, along])
            squeezed = ir.node("Squeeze", [part.outputs[0], along])
            made = [axis, *bounds, part, squeezed]
            ir.convenience.replace_nodes_and_values(model.graph, node, [node], made, node.outputs, squeezed.outputs)
        return ir.passes.PassResult(model, bool(found))


def _constant_index(node: ir.Node) -> int | None:
    """The constant index that the node takes from another node's result; None if the node does something else."""
    if node.op_type != "Gather" or node.domain != "" or required_input(node).producer() is None:
        return None
    index = required_input(node, 1).const_value
    return int(index.numpy().item()) if index is not None and not len(index.shape) else None
