"""What passes do that are made of rewrite rules: apply them, and remove what nobody reads any more."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript import rewriter


def rewritten(model: ir.Model, *rules: rewriter.RewriteRule) -> bool:
    """Whether any of `rules` applied."""
    changed: bool = rewriter.RewritePass(rules)(model).modified
    if changed:
        RemoveUnusedNodesPass()(model)
    return changed
