"""Turn a norm (Gemma's, Cohere's, OLMo's) or rotary embedding (DeepSeek-V2's) in fp32 between casts into one operator that reads
and writes the narrow type.

    Cast(RMSNormalization(Cast(x), scale fp32))      ->      RMSNormalization(x, Cast(scale))

Why: three kernels become one, which can take in a residual sum before it (`fuse_skip_norm`). On CUDA a step of 6 layers is 88
kernels instead of 147 (Gemma 2), 104 instead of 154 (OLMo 2). ONNX Runtime's kernels sum in fp32 in any case. A norm's scale is
rounded only where it is not itself a weight of the narrow type. Gemma's 1 + weight is rounded: its logits' error grows by a tenth
of what the type costs anyway. Tables of cosines and sines are rounded as in most models.
"""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from skipdecode.graph_passes.conventions import NARROW, NORMS, cast_node
from skipdecode.graph_passes.take_over import take_over

logger = logging.getLogger(__name__)

_OPERATORS = (*NORMS, "RotaryEmbedding")


class NarrowOperatorsPass(ir.passes.InPlacePass):
    """Removes the casts around norms and rotary embeddings in fp32.

    Declines where the fp32 result has any reader but one Cast to the narrow type.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        count = sum(_remove_casts(model.graph, node) for node in list(model.graph) if node.op_type in _OPERATORS)
        if count:
            RemoveUnusedNodesPass()(model)
        logger.info("narrowed %d operators", count)
        return ir.passes.PassResult(model, bool(count))


def _remove_casts(graph: ir.Graph, node: ir.Node) -> bool:
    """Remove the casts around `node`; whether it had them on both sides."""
    rows, made, readers = _before_cast(node.inputs[0]), node.outputs[0], node.outputs[0].consumers()
    kind = rows.dtype
    if kind not in NARROW or made.is_graph_output() or len(readers) != 1:
        return False
    (back,) = readers
    if back.op_type != "Cast" or back.outputs[0].dtype != kind:
        return False
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype != ir.DataType.INT64:  # positions
            node.replace_input_with(index, _as_narrow(graph, node, value, kind))
    take_over(back.outputs[0], made)
    return True


def _as_narrow(graph: ir.Graph, before: ir.Node, value: ir.Value, kind: ir.DataType) -> ir.Value:
    source = _before_cast(value)
    if source.dtype == kind:
        return source
    narrow = cast_node(source, kind)
    graph.insert_before(before, narrow)
    return narrow.outputs[0]


def _before_cast(value: ir.Value | None) -> ir.Value:
    """The input of the Cast that makes `value`; `value` itself where none does."""
    assert value is not None
    node = value.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Cast" else None
    return source or value
