"""Rewrite products by quantised weights for the CUTLASS kernels of ONNX Runtime's CUDA provider.

    MatMulNBits(x, weight, scales, .., bias) -> Add(MatMulNBits(x, weight, scales, ..), bias)
    MatMulNBits(x, weight, scales)           -> MatMulNBits(x, weight, scales, zero points in the middle), if K % 64 != 0

Why: these kernels take no bias, which the provider adds by a separate kernel in any case. They accept a width K that is not a
multiple of 64 and then fail in the first run (onnxruntime-gpu 1.31.1). They take no zero points either, so that zero points leave
the product to the provider's other kernels. In the middle of the levels, the default, zero points change nothing.
"""

from __future__ import annotations

import logging

import onnx_ir as ir

from skipdecode.graph_passes.conventions import optional_input, required_input
from skipdecode.graph_passes.quantization import middle_zero_points
from skipdecode.graph_passes.quantize_weights import register_parts

logger = logging.getLogger(__name__)
_TILE_WIDTH = 64  # inputs that a tile of the CUTLASS kernels takes
_WEIGHT, _ZERO_POINTS, _BIAS = 1, 3, 5  # the operator's inputs


class FitProductsToCutlassPass(ir.passes.InPlacePass):
    """Moves biases out of quantised products, and gives zero points to those whose width is not a multiple of 64.

    Leaves products without a bias whose width is a multiple of 64 or which have zero points.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type == "MatMulNBits" and not _needs_no_rewrite(node)]
        for node in found:
            _rewrite(model.graph, node)
        logger.info("rewrote %d products by quantised weights", len(found))
        return ir.passes.PassResult(model, bool(found))


def _needs_no_rewrite(node: ir.Node) -> bool:
    return optional_input(node, _BIAS) is None and not _lacks_zero_points(node)


def _lacks_zero_points(node: ir.Node) -> bool:
    return node.attributes["K"].as_int() % _TILE_WIDTH != 0 and optional_input(node, _ZERO_POINTS) is None


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    inputs, bias = [*node.inputs[:_BIAS]], optional_input(node, _BIAS)
    if _lacks_zero_points(node):
        inputs[_ZERO_POINTS:] = [_zero_points(graph, node)]
    made = [ir.node("MatMulNBits", inputs, node.attributes, domain=node.domain)]
    if bias is not None:
        made.append(ir.node("Add", [made[0].outputs[0], bias]))
    ir.convenience.replace_nodes_and_values(graph, node, [node], made, node.outputs, made[-1].outputs)


def _zero_points(graph: ir.Graph, node: ir.Node) -> ir.Value:
    outputs, inputs, block, bits = (node.attributes[name].as_int() for name in ("N", "K", "block_size", "bits"))
    name = str(required_input(node, _WEIGHT).name).removesuffix(".quantised.weight")
    return register_parts(graph, name, middle_zero_points(outputs, inputs // block, bits))[0]
