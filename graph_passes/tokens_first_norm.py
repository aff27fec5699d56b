"""Norms of heads that are turned to the front already (Gemma 3's query and key), before they are.

    RMSNormalization(Transpose(x [B,S,N,D]), scale [D])      ->      Transpose(RMSNormalization(x, scale))

Why: the attention that runtimes have takes rows, so that its lowering turns heads back, which then is nothing. A layer of
Gemma 3 has four operators less.
"""

from __future__ import annotations

import onnx_ir as ir

from skipdecode.graph_passes.conventions import NORMS
from skipdecode.graph_passes.take_over import take_over


class TokensFirstNormPass(ir.passes.InPlacePass):
    """Applies to norms over the last axis of what nothing else reads turned, where turning leaves that axis the last one."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type in NORMS and _turn_before(node) is not None]
        for node in found:
            _turn_behind(model.graph, node)
        return ir.passes.PassResult(model, bool(found))


def _turn_before(norm: ir.Node) -> ir.Node | None:
    turned = norm.inputs[0]
    turn = turned.producer() if turned is not None else None
    if turn is None or turn.op_type != "Transpose" or len(turn.outputs[0].consumers()) > 1 or turn.outputs[0].is_graph_output():
        return None
    perm = list(turn.attributes["perm"].as_ints())
    last = len(perm) - 1
    return turn if perm[last] == last and norm.attributes.get_int("axis", -1) in (-1, last) else None


def _turn_behind(graph: ir.Graph, norm: ir.Node) -> None:
    turn, made = _turn_before(norm), norm.outputs[0]
    assert turn is not None
    rows = turn.inputs[0]
    assert rows is not None
    norm.replace_input_with(0, rows)
    take_over(made, turn.outputs[0])
    made.shape = rows.shape
    turn.replace_input_with(0, made)
    graph.remove(turn)
    graph.insert_after(norm, turn)
