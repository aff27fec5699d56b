"""Cast logits to fp32, whatever the head computes in: the same code compares and exponentiates them on every target.

logits fp16  ->  Cast(logits), fp32
"""

from __future__ import annotations

import onnx_ir as ir

from skipdecode.graph_passes.conventions import NARROW, cast_node


class WidenLogitsPass(ir.passes.InPlacePass):
    """Casts every graph output of a narrow float to fp32."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        narrow = [value for value in model.graph.outputs if value.dtype in NARROW]
        for value in narrow:
            widened = cast_node(value, ir.DataType.FLOAT)
            model.graph.append(widened)
            wide = widened.outputs[0]
            wide.name, value.name = value.name, f"{value.name}.narrow"
            model.graph.outputs[model.graph.outputs.index(value)] = wide
        return ir.passes.PassResult(model, bool(narrow))
