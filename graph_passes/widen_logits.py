"""Logits in fp32, whatever the head computes in: they are compared and exponentiated, by one code for every target.

head -> logits fp16      ->      head -> Cast(to=FLOAT) -> logits fp32
"""

from __future__ import annotations

import onnx_ir as ir

from skipdecode.graph_passes.conventions import NARROW, cast


class WidenLogitsPass(ir.passes.InPlacePass):
    """Applies to every output of a narrow float."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        narrow = [value for value in model.graph.outputs if value.dtype in NARROW]
        for value in narrow:
            widened = cast(value, ir.DataType.FLOAT)
            model.graph.append(widened)
            wide = widened.outputs[0]
            wide.name, value.name = value.name, f"{value.name}.narrow"
            model.graph.outputs[model.graph.outputs.index(value)] = wide
        return ir.passes.PassResult(model, bool(narrow))
