"""Lower opset 27's LinearAttention and CausalConvWithState to ONNX Runtime's own operators of the same name and meaning.

    LinearAttention(..)  ->  com.microsoft.LinearAttention(..), and the graph is one of opset 24 again

Why: ONNX Runtime 1.32 runs the standard operators as the functions in their specification, a Scan over the tokens and a Conv. A
layer is 85 nodes that way, and 52 with ONNX Runtime's own kernels.
"""

from __future__ import annotations

import onnx_ir as ir

from skipdecode.graph_passes.conventions import MS_DOMAIN, OPSET, WITH_STATES


class LowerLinearAttentionPass(ir.passes.InPlacePass):
    """Moves the operators to ONNX Runtime's domain. Changes nothing else but the graph's opset imports."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.domain == "" and node.op_type in WITH_STATES]
        for node in found:
            node.domain = MS_DOMAIN
        if found:
            model.graph.opset_imports.update({"": OPSET, MS_DOMAIN: 1})
        return ir.passes.PassResult(model, bool(found))
