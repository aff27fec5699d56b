"""Norms whose scale is wider than their input (Gemma computes both in fp32): one type throughout.

    RMSNormalization(x fp16, scale fp32)      ->      RMSNormalization(Cast(x), scale)

The operator allows two types; ONNX Runtime's CUDA provider has no such kernel for bf16, its CPU provider none at all.
"""

from __future__ import annotations

import onnx_ir as ir

from skipdecode.graph_passes.conventions import cast


class UniformNormPass(ir.passes.InPlacePass):
    """Applies to norms whose input and scale differ in type."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        changed = False
        for node in list(model.graph):
            if node.op_type != "RMSNormalization" or node.inputs[0] is None or node.inputs[1] is None:
                continue
            rows, wanted = node.inputs[0], node.inputs[1].dtype
            if wanted is not None and rows.dtype != wanted:
                widened = cast(rows, wanted)
                model.graph.insert_before(node, widened)
                node.replace_input_with(0, widened.outputs[0])
                changed = True
        return ir.passes.PassResult(model, changed)
