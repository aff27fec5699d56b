"""Quantise a mixture of experts in the same blocks that QuantizeWeightsPass uses for matrices.

    com.microsoft.MoE(x, router, W_gate_up [E,2I,H], its bias, W_down [E,H,I], its bias)
    -> com.microsoft.QMoE(x, router, both quantised, each with its scales and bias[, zero points]), activations in int8

ONNX Runtime packs them as it packs matrices: for a CPU the packed form is stored and mapped, on a GPU every load packs again.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from skipdecode.graph_passes.conventions import MS_DOMAIN
from skipdecode.graph_passes.mapped import release_pages
from skipdecode.graph_passes.quantization import Parts, Quantization
from skipdecode.graph_passes.quantize_weights import register_parts

logger = logging.getLogger(__name__)


class QuantizeExpertsPass(ir.passes.InPlacePass):
    """Quantises the matrices of every mixture. Widths must be multiples of the block size (`exporter.feasible` checks this)."""

    def __init__(self, quantization: Quantization) -> None:
        super().__init__()
        self.quantization = quantization

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type == "MoE" and node.domain == MS_DOMAIN]
        for node in found:
            self._replace(model.graph, node)
        if found:
            RemoveUnusedNodesPass()(model)
        logger.info("quantised %d mixtures of experts to %d bits", len(found), self.quantization.bits)
        return ir.passes.PassResult(model, bool(found))

    def _replace(self, graph: ir.Graph, node: ir.Node) -> None:
        rows, router, gate_up, up_bias, down, down_bias = [*node.inputs, None][:6]
        assert gate_up is not None and down is not None
        up_weight, up_scales, *up_zeros = register_parts(graph, str(gate_up.name), self._parts(gate_up))
        down_weight, down_scales, *down_zeros = register_parts(graph, str(down.name), self._parts(down))
        inputs = [rows, router, up_weight, up_scales, up_bias, down_weight, down_scales, down_bias]
        if up_zeros:
            inputs += [None, None, None, *up_zeros, *down_zeros]
        how_quantised = {
            "expert_weight_bits": self.quantization.bits,
            "block_size": self.quantization.block_size,
            "accuracy_level": 4,
            "weights_prepacked": 0,
        }
        quantised = ir.node("QMoE", inputs, {**node.attributes, **how_quantised}, domain=MS_DOMAIN)
        ir.convenience.replace_nodes_and_values(graph, node, [node], [quantised], node.outputs, quantised.outputs)

    def _parts(self, parameter: ir.Value) -> Parts:
        """Quantise a parameter [E,N,K] to levels [E, N, K * bits / 8], scales [E, N, K / block] and, if needed, zero points."""
        tensor = parameter.const_value
        assert tensor is not None
        outputs = tensor.shape.numpy()[1]
        each = [self.quantization.quantise(np.asarray(matrix, dtype=np.float32)) for matrix in tensor.numpy()]
        release_pages(tensor)
        if any("zero_points" in parts for parts in each):
            each = [self.quantization.with_zero_points(parts) for parts in each]
        stacked = {name: np.stack([parts[name].reshape(outputs, -1) for parts in each]) for name in each[0]}
        return stacked | {"scales": stacked["scales"].astype(tensor.dtype.numpy())}  # CUDA takes only the rows' dtype
