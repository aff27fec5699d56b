"""Write out a causal convolution that keeps a state as a sum of shifted tokens: TensorRT lacks the operator.

    CausalConvWithState(x [B,C,S], weight [C,1,K], bias, past [B,C,K-1])
    -> bias + the sum over K of tokens[:, k : k + S] * weight[:, 0, k], with tokens = Concat(past, x) [B,K-1+S,C], whose last
       K - 1 are the new state

Why not Conv: for its layout TensorRT-RTX 1.7.1 transposes the product in front of it, but in prompts only, and stores that
product's matrix a second time (see `split_products`). Written so, a layer of Mamba-2 also has fewer kernels.

The graph goes back to the opset of standard graphs (`OPSET`).
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from skipdecode.graph_passes.conventions import OPSET, TO_THE_END, int64_constant, required_input, slice_along, static_dim

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
    taps = static_dim(past, 2) + 1
    joined = tape.op("Concat", [_transposed(tape, past), _transposed(tape, inputs)], {"axis": 1})
    weights = tape.op("Transpose", [tape.op("Squeeze", [weight, int64_constant(tape, 1)])], {"perm": [1, 0]})  # [K,C]
    out = bias
    for tap in range(taps):
        tokens = slice_along(tape, joined, 1, tap, (tap + 1 - taps) or TO_THE_END)
        product = tape.op("Mul", [tokens, slice_along(tape, weights, 0, tap, tap + 1)])
        out = product if out is None else tape.op("Add", [out, product])
    assert out is not None
    if activation in _SILU:
        out = tape.op("Mul", [out, tape.op("Sigmoid", [out])])
    out = _transposed(tape, out)
    present = _transposed(tape, slice_along(tape, joined, 1, 1 - taps))
    ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [out, present])


def _transposed(tape: Tape, value: ir.Value) -> ir.Value:
    return tape.op("Transpose", [value], {"perm": [0, 2, 1]})
