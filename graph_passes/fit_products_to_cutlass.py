"""Products by quantised weights as CUTLASS's kernels in ONNX Runtime's CUDA provider take them.

    MatMulNBits(x, weight, scales, .., bias) -> Add(MatMulNBits(x, weight, scales, ..), bias)
    MatMulNBits(x, weight, scales)           -> MatMulNBits(x, weight, scales, zero points in the middle), of an uneven width

They take no bias, which the provider adds by a kernel of its own in any case. Of a width that is no multiple of 64 they accept a
product and fail in its first run (onnxruntime-gpu 1.31.1); zero points, which they do not take, leave it to the provider's other
kernels, and in the middle of the levels, where they are without being written out, they change nothing.
"""

from __future__ import annotations

import logging

import onnx_ir as ir

from skipdecode.graph_passes.conventions import optional, required
from skipdecode.graph_passes.quantization import middle_zero_points
from skipdecode.graph_passes.quantize_weights import register_parts

logger = logging.getLogger(__name__)
_WIDTH = 64  # inputs that a tile of theirs takes
_WEIGHT, _ZERO_POINTS, _BIAS = 1, 3, 5  # the operator's inputs


class FitProductsToCutlassPass(ir.passes.InPlacePass):
    """Leaves products that have no bias and an even width, or zero points."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type == "MatMulNBits" and not _is_plain(node)]
        for node in found:
            _rewrite(model.graph, node)
        logger.info("rewrote %d products by quantised weights", len(found))
        return ir.passes.PassResult(model, bool(found))


def _is_plain(node: ir.Node) -> bool:
    return optional(node, _BIAS) is None and not _lacks_zero_points(node)


def _lacks_zero_points(node: ir.Node) -> bool:
    return node.attributes["K"].as_int() % _WIDTH != 0 and optional(node, _ZERO_POINTS) is None


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    inputs, bias = [*node.inputs[:_BIAS]], optional(node, _BIAS)
    if _lacks_zero_points(node):
        inputs[_ZERO_POINTS:] = [_zero_points(graph, node)]
    made = [ir.node("MatMulNBits", inputs, node.attributes, domain=node.domain)]
    if bias is not None:
        made.append(ir.node("Add", [made[0].outputs[0], bias]))
    ir.convenience.replace_nodes_and_values(graph, node, [node], made, node.outputs, made[-1].outputs)


def _zero_points(graph: ir.Graph, node: ir.Node) -> ir.Value:
    outputs, inputs, block, bits = (node.attributes[name].as_int() for name in ("N", "K", "block_size", "bits"))
    name = str(required(node, _WEIGHT).name).removesuffix(".quantised.weight")
    return register_parts(graph, name, middle_zero_points(outputs, inputs // block, bits))[0]
