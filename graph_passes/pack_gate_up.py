"""One matrix for the gate and the up projection of a gated MLP, its rows split after.

    MatMul(x, Wg) -> gate; MatMul(x, Wu) -> up      ->      gate, up = Split(MatMul(x, [Wg Wu]))

A decode step at batch 1, interleaved (AMD EPYC, 2 cores): Llama-like 16 x 1024 1.04x as fast in fp32, 1.02x to 1.04x in int4 (one
product in the thread pool instead of two; the split copies a few kilobytes).
"""

from __future__ import annotations

from collections import defaultdict

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from skipdecode.graph_passes.projection import Projection, find_projection, packed_product
from skipdecode.graph_passes.take_over import take_over


class PackGateUpPass(ir.passes.InPlacePass):
    """Declines where not exactly two products read the same rows, or they differ in shape."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        readers: dict[ir.Value, list[ir.Node]] = defaultdict(list)
        for node in model.graph:
            if node.op_type == "MatMul" and node.inputs[0] is not None:
                readers[node.inputs[0]].append(node)
        pairs = [nodes for nodes in readers.values() if len(nodes) == 2]
        changed = False
        for first, second in pairs:
            gate, up = find_projection(first.outputs[0], shared=True), find_projection(second.outputs[0], shared=True)
            if gate is not None and up is not None and _alike(gate, up):
                _pack(model.graph, first, second, gate, up)
                changed = True
        if changed:
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, changed)


def _alike(gate: Projection, up: Projection) -> bool:
    return gate.turned == up.turned and gate.weight is not up.weight and gate.weight.shape == up.weight.shape


def _pack(graph: ir.Graph, first: ir.Node, second: ir.Node, gate: Projection, up: Projection) -> None:
    nodes = packed_product(graph, [gate, up])
    nodes.append(ir.node("Split", [nodes[-1].outputs[0]], {"axis": -1, "num_outputs": 2}, num_outputs=2))
    graph.insert_before(first, nodes)
    for node, part in zip((first, second), nodes[-1].outputs, strict=True):
        take_over(node.outputs[0], part)
