"""Apply rewrite rules on behalf of a pass: log how often they matched, and remove the nodes that they left unused."""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript import rewriter

logger = logging.getLogger(__name__)


def apply_rules(model: ir.Model, *rules: rewriter.RewriteRule) -> bool:
    """Apply `rules` to `model` in place; whether any of them matched."""
    count: int = rewriter.RewriteRuleSet(rules).apply_to_model(model)
    if count:
        RemoveUnusedNodesPass()(model)
        logger.info("%s: %d", ", ".join(dict.fromkeys(rule.name.strip("_") for rule in rules)), count)
    return bool(count)
