"""Quantise the token embedding in the same blocks that QuantizeWeightsPass uses for the head.

    Gather(W, input_ids) -> com.microsoft.GatherBlockQuantized(W quantised, input_ids, scales[, zero points])

A step reads only one row per token, so this saves no time. It saves a copy: a tied embedding and head become the same bytes.
Other tables (positions) stay as they are: they are small, and their error would enter every hidden state.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir

from skipdecode import bindings
from skipdecode.graph_passes.conventions import MS_DOMAIN, is_parameter
from skipdecode.graph_passes.mapped import release_pages
from skipdecode.graph_passes.quantization import Parts, Quantization
from skipdecode.graph_passes.quantize_weights import register_parts

logger = logging.getLogger(__name__)


class QuantizeEmbeddingPass(ir.passes.InPlacePass):
    """Quantises the token embedding's table.

    Declines tables whose width is not a multiple of the block size, and tables not indexed directly by `input_ids`.
    """

    def __init__(self, quantization: Quantization) -> None:
        super().__init__()
        self.quantization = quantization

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if self._applies(node)]
        for node in found:
            self._replace(model.graph, node)
        if found:
            model.graph.opset_imports[MS_DOMAIN] = 1
        logger.info("quantised %d embeddings to %d bits", len(found), self.quantization.bits)
        return ir.passes.PassResult(model, bool(found))

    def _applies(self, node: ir.Node) -> bool:
        if node.op_type != "Gather" or node.domain != "" or node.inputs[0] is None or node.inputs[1] is None:
            return False
        table, ids = node.inputs[0], node.inputs[1]
        if not ids.is_graph_input() or ids.name != bindings.INPUT_IDS or table.const_value is None or not is_parameter(table):
            return False
        shape = table.const_value.shape
        return (
            node.attributes.get_int("axis", 0) == 0 and len(shape) == 2 and shape.numpy()[1] % self.quantization.block_size == 0
        )

    def _replace(self, graph: ir.Graph, node: ir.Node) -> None:
        table, ids = node.inputs[0], node.inputs[1]
        assert table is not None and table.const_value is not None
        parts = self.quantization.quantise(np.asarray(table.const_value.numpy(), dtype=np.float32))
        data, scales, *zeros = register_parts(graph, str(table.name), _by_row(parts))
        attributes = {
            "gather_axis": 0,
            "quantize_axis": 1,
            "bits": self.quantization.bits,
            "block_size": self.quantization.block_size,
        }
        lookup = ir.node("GatherBlockQuantized", [data, ids, scales, *zeros], attributes, domain=MS_DOMAIN)
        ir.convenience.replace_nodes_and_values(graph, node, [node], [lookup], node.outputs, lookup.outputs)
        release_pages(table.const_value)
        if not table.uses():
            del graph.initializers[str(table.name)]


def _by_row(parts: Parts) -> Parts:
    """The same bytes in the lookup's layout, one row of each input per table row."""
    return {name: data.reshape(len(parts["weight"]), -1) for name, data in parts.items()}
