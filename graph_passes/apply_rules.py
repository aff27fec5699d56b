"""What passes do that are made of rewrite rules: apply them, say how often they did, and remove what nobody reads any more."""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript import rewriter

logger = logging.getLogger(__name__)


def apply_rules(model: ir.Model, *rules: rewriter.RewriteRule) -> bool:
    """Whether any of `rules` applied."""
    count: int = rewriter.RewriteRuleSet(rules).apply_to_model(model)
    if count:
        RemoveUnusedNodesPass()(model)
        logger.info("%s: %d", ", ".join(dict.fromkeys(rule.name.strip("_") for rule in rules)), count)
    return bool(count)
