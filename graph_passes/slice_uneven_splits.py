"""Replace a Split into parts of different sizes by one Slice per part.

    Split(x, sizes [4, 2, 2]) -> Slice(x, 0, 4), Slice(x, 4, 6), Slice(x, 6, 8)

Why: for different sizes ONNX Runtime's CUDA provider copies a table from host memory in each run. A CUDA graph would replay that
copy after the memory has been reused.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import onnx_ir as ir

from skipdecode.graph_passes.conventions import int64_constant_node, optional_input
from skipdecode.graph_passes.take_over import take_over


class SliceUnevenSplitsPass(ir.passes.InPlacePass):
    """Replaces each Split into different sizes. Declines Splits into equal parts, for which the provider needs no table."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        uneven = [(node, sizes) for node in model.graph if (sizes := _uneven_sizes(node))]
        for node, sizes in uneven:
            _slice(model.graph, node, sizes)
        return ir.passes.PassResult(model, bool(uneven))


def _uneven_sizes(node: ir.Node) -> list[int]:
    """The sizes of the parts; empty where they are equal or the node is not such a Split."""
    given = optional_input(node, 1) if node.op_type == "Split" else None
    if given is None:
        return []
    sizes = given.const_value
    assert sizes is not None, f"{node.name}: sizes that are not constant"
    listed: list[int] = sizes.numpy().tolist()
    return listed if len({*listed}) > 1 else []


def _slice(graph: ir.Graph, node: ir.Node, sizes: list[int]) -> None:
    axis = node.attributes.get_int("axis", default=0)
    for part, (start, end) in zip(node.outputs, pairwise(accumulate(sizes, initial=0)), strict=True):
        bounds = [int64_constant_node(bound) for bound in (start, end, axis)]
        slice_ = ir.node("Slice", [node.inputs[0], *(bound.outputs[0] for bound in bounds)])
        graph.insert_before(node, [*bounds, slice_])
        take_over(part, slice_.outputs[0])
    graph.remove(node, safe=True)
