"""Move the weights of norms that differ by group or head (Falcon-H1's Mamba, Cohere's query and key) behind the norm.

    RMSNormalization(x [B,S,N,D], scale [N,D])             ->      RMSNormalization(x, ones [D]) * scale
    LayerNormalization(x [B,S,N,D], scale [N,D], bias)     ->      LayerNormalization(x, ones [D]) * scale + bias

Why: ONNX Runtime's CUDA kernels (1.31.1) broadcast a scale only where it has the rank of x and the axis is 2. In any other case
they silently apply the first D numbers to every row (microsoft/onnxruntime#28971). The CPU's kernels broadcast all. TensorRT's
normalization layer builds with a scale of [1,1,N,D], but its documentation requires 1 on axes that are not normalized. Narrow
floats are rounded once more, between norm and product.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from skipdecode.graph_passes.conventions import NORMS, norm_with_unit_scale, required_input, scales_last_axis_only


class SplitNormScalesPass(ir.passes.InPlacePass):
    """Moves weights that differ by group or head behind their norm. Declines norms whose weights are [D].

    Runs after the passes that fuse norms.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type in NORMS and not scales_last_axis_only(node)]
        for node in found:
            _move_weights_behind(model.graph, node)
        return ir.passes.PassResult(model, bool(found))


def _move_weights_behind(graph: ir.Graph, norm: ir.Node) -> None:
    rows, made = required_input(norm), norm.outputs[0]
    assert norm.attributes.get_int("axis", -1) in (-1, len(rows.shape or ()) - 1)
    tape = Tape()
    value = norm_with_unit_scale(tape, norm, rows)
    for kind, weights in zip(("Mul", "Add"), norm.inputs[1:], strict=False):
        if weights is not None:
            value.shape, value.type = made.shape, made.type
            value = tape.op(kind, [value, weights])
    ir.convenience.replace_nodes_and_values(graph, norm, [norm], tape.nodes, [made], [value])
