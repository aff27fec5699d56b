"""Compute layers that keep states in fp32, from their convolution through their recurrence, and keep the states in fp32.

    CausalConvWithState(x fp16, W, bias, past fp16) .. LinearAttention(.., past fp16) -> y fp16
    -> CausalConvWithState(Cast(x), Cast(W), Cast(bias), past fp32) .. LinearAttention(.., past fp32) -> Cast(y)

Why: a state accumulates all earlier tokens, so the rounding of every step stays in it (the configurations of Qwen3.5 and
Nemotron-H ask for fp32, `mamba_ssm_dtype`). ONNX Runtime's CUDA kernels require one type for all inputs of an operator.
"""

from __future__ import annotations

import onnx_ir as ir

from skipdecode.bindings import PAST
from skipdecode.graph_passes.conventions import NARROW, WITH_STATES, cast_node, is_cast_to, producer

_DELIMITING_PRODUCTS = ("MatMul", "Gemm", "MatMulNBits")  # these delimit the part of a layer that is widened
_LAYOUT_OPS = ("Squeeze", "Transpose")  # bring a Mamba's state to its stored layout


class WidenStatesPass(ir.passes.InPlacePass):
    """Computes what depends on states in fp32. In narrow graphs, this changes the type of inputs and outputs that are states."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        states = [node for node in model.graph if node.op_type in WITH_STATES and node.outputs[0].dtype in NARROW]
        wide = {*states}
        for node in states:
            _mark_before(node, wide)
            _mark_after(node.outputs[1], wide)
        for node in [node for node in model.graph if node in wide]:
            _widen(model.graph, node, wide)
        return ir.passes.PassResult(model, bool(states))

    def ensures(self, model: ir.Model) -> None:
        for node in model.graph:
            if node.op_type in WITH_STATES and {value.dtype for value in (*node.inputs, *node.outputs) if value} & {*NARROW}:
                raise ir.passes.PostconditionError(f"{node.name} computes in a narrow type")


def _mark_after(state: ir.Value, wide: set[ir.Node]) -> None:
    """Add to `wide` the nodes between an operator's state and the graph output."""
    for reader, _ in state.uses():
        if reader.op_type in _LAYOUT_OPS:
            wide.add(reader)
            _mark_after(reader.outputs[0], wide)


def _mark_before(node: ir.Node, wide: set[ir.Node]) -> bool:
    """Add to `wide` the nodes on paths from a state, or an operator with one, to `node`; return whether there are any."""
    found = False
    for value in node.inputs:
        found |= value is not None and _is_state(value)
        before = producer(value)
        if before is None or before.op_type in _DELIMITING_PRODUCTS:
            continue
        if before in wide or _mark_before(before, wide):
            wide.add(before)
            found = True
    return found


def _is_state(value: ir.Value) -> bool:
    """Whether the value is a state input: what the layer kept of earlier tokens."""
    return value.is_graph_input() and str(value.name).startswith(PAST)


def _widen(graph: ir.Graph, node: ir.Node, wide: set[ir.Node]) -> None:
    for index, value in enumerate(node.inputs):
        if value is None or value.dtype not in NARROW:
            continue
        if _is_state(value):
            value.type = ir.TensorType(ir.DataType.FLOAT)
        else:
            widened = cast_node(value, ir.DataType.FLOAT)
            graph.insert_before(node, widened)
            node.replace_input_with(index, widened.outputs[0])
    if node.op_type == "Cast" and ir.DataType(node.attributes["to"].as_int()) in NARROW:
        node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
    for value in node.outputs:
        if value.dtype in NARROW:
            _make_wide(graph, node, value, wide)


def _make_wide(graph: ir.Graph, node: ir.Node, value: ir.Value, wide: set[ir.Node]) -> None:
    """Make an output of a wide node fp32. Other nodes read it cast back, except casts to fp32, which are removed."""
    narrow, value.type = value.dtype, ir.TensorType(ir.DataType.FLOAT)
    assert narrow is not None
    narrowed: ir.Node | None = None
    for reader, index in [*value.uses()]:
        if reader in wide:
            continue
        if is_cast_to(reader, ir.DataType.FLOAT):
            ir.convenience.replace_all_uses_with(reader.outputs[0], value)
            graph.remove(reader, safe=True)
            continue
        if narrowed is None:
            narrowed = cast_node(value, narrow)
            graph.insert_after(node, narrowed)
        reader.replace_input_with(index, narrowed.outputs[0])
