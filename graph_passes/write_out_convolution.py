"""Write out a causal convolution that keeps a state as a Conv over state and new tokens: TensorRT lacks the operator.

    CausalConvWithState(x [B,C,S], weight [C,1,K], bias, past [B,C,K-1])
    -> Conv <group = C> (Concat(past, x), weight, bias), and the last K - 1 of Concat(past, x)

The graph goes back to the opset of standard graphs (`OPSET`).
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from skipdecode.graph_passes.conventions import OPSET, TO_THE_END, int64_constant, required_input, static_dim

_SILU = ("silu", "swish")  # two names of x * Sigmoid(x)


class WriteOutConvolutionPass(ir.passes.InPlacePass):
    """Writes out every CausalConvWithState, with activation SiLU or none."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type == "CausalConvWithState"]
        for node in found:
            _write_out(model.graph, node)
        if found:
            model.graph.opset_imports[""] = OPSET
        return ir.passes.PassResult(model, bool(found))


def _write_out(graph: ir.Graph, node: ir.Node) -> None:
    inputs, weight, bias, past = required_input(node), required_input(node, 1), node.inputs[2], required_input(node, 3)
    activation = node.attributes.get_string("activation", "none")
    assert activation in ("none", *_SILU), f"activation {activation}"
    tape = Tape()
    joined = tape.op("Concat", [past, inputs], {"axis": 2})
    out = tape.op("Conv", [joined, weight, *([bias] if bias is not None else [])], {"group": static_dim(weight, 0)})
    if activation in _SILU:
        out = tape.op("Mul", [out, tape.op("Sigmoid", [out])])
    present = tape.op("Slice", [joined, *(int64_constant(tape, bound) for bound in (-static_dim(past, 2), TO_THE_END, 2))])
    ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [out, present])
