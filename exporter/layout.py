"""What everything that writes into a bundle agrees on."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

GRAPHS = "graphs"  # ONNX Runtime reads weights only from the graph's own folder, so graphs and weights share one

Report = Callable[[str, float], None]  # (what is being done, fraction that is done)


def weight_bytes(graph: ir.Graph) -> int:
    """What a step reads whole: not the rotary tables, of which attention takes a row a position."""
    weights = (
        value.const_value.nbytes
        for value in graph.initializers.values()
        if value.const_value is not None and not any(use.node.op_type == "GroupQueryAttention" for use in value.uses())
    )
    return sum(weights)
