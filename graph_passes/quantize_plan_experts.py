"""Quantise the experts' matrices in standard operators, for TensorRT, so that a step reads only the levels of its experts.

    W [E,N,K]  ->  Reshape(Cast(DequantizeLinear(levels [E*N,K], scales fp32)), [E,N,K])

Levels and scales are as in `quantize_plan_weights`. TensorRT-RTX 1.7.1 fuses these nodes with a step's look-up, product and sum
(`write_out_experts`) into one kernel. For a prompt it writes the dequantised matrix out, once per pass. With 16-bit scales and no
Cast it would not, but it would store 4-bit levels twice, in two orders.

Where a zero point is not the middle level, (8 - zero) * scale is added to each number of its block.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from skipdecode.graph_passes.conventions import add_constant, int64_constant, is_parameter
from skipdecode.graph_passes.mapped import release_pages
from skipdecode.graph_passes.quantization import Parts, Quantization
from skipdecode.graph_passes.quantize_plan_weights import Array, as_int4, quantise_by_output, zero_point_corrections

logger = logging.getLogger(__name__)


class QuantizePlanExpertsPass(ir.passes.InPlacePass):
    """Quantises parameters [E,N,K] read by a Gather. In 4 bits declines those whose K is not a multiple of the block size."""

    def __init__(self, quantization: Quantization) -> None:
        super().__init__()
        self.quantization = quantization

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [value for value in model.graph.initializers.values() if self._applies(value)]
        for value in found:
            _replace(model.graph, value, self.quantization)
        logger.info("quantised %d matrices of experts to %d bits", len(found), self.quantization.bits)
        return ir.passes.PassResult(model, bool(found))

    def _applies(self, value: ir.Value) -> bool:
        if value.const_value is None or not is_parameter(value) or len(value.const_value.shape) != 3:
            return False
        inputs = value.const_value.shape.numpy()[2]
        looked_up = any(node.op_type == "Gather" for node in value.consumers())
        return looked_up and (self.quantization.bits == 8 or inputs % self.quantization.block_size == 0)


def _replace(graph: ir.Graph, parameter: ir.Value, quantization: Quantization) -> None:
    tensor, tape, name = parameter.const_value, Tape(), str(parameter.name)
    assert tensor is not None
    experts, outputs, inputs = sizes = tensor.shape.numpy()

    def store(suffix: str, numbers: Array | ir.PackedTensor[Any]) -> ir.Value:
        tensor = numbers if isinstance(numbers, ir.PackedTensor) else ir.tensor(numbers)
        tensor.name = f"{name}.quantised.{suffix}"
        stored = add_constant(graph, tensor)
        stored.meta.update(parameter.meta)
        return stored

    matrices = (np.asarray(matrix, dtype=np.float32) for matrix in tensor.numpy())
    if quantization.bits == 4:
        each = [quantization.quantise(matrix) for matrix in matrices]
        packed = np.concatenate([as_int4(parts).reshape(-1) for parts in each])
        shape = ir.Shape([experts * outputs, inputs])
        levels = store("levels", ir.PackedTensor(packed, ir.DataType.INT4, shape=shape))
        scales = store("scales", np.concatenate([parts["scales"].reshape(outputs, -1) for parts in each]))
        floats = tape.op("DequantizeLinear", [levels, scales], {"axis": 1, "block_size": quantization.block_size})
        if any("zero_points" in parts for parts in each):
            corrections = store("missing", np.concatenate([_corrections_or_zeros(parts) for parts in each])[..., None])
            blocks = tape.op("Reshape", [floats, int64_constant(tape, experts * outputs, -1, quantization.block_size)])
            floats = tape.op("Reshape", [tape.op("Add", [blocks, corrections]), int64_constant(tape, experts * outputs, inputs)])
    else:
        by_expert = [quantise_by_output(matrix, ir.DataType.FLOAT) for matrix in matrices]
        levels = store("levels", np.concatenate([levels for levels, _ in by_expert]))
        scales = store("scales", np.concatenate([scales for _, scales in by_expert]))
        floats = tape.op("DequantizeLinear", [levels, scales], {"axis": 0})
    release_pages(tensor)
    narrow = tape.op("Reshape", [tape.op("Cast", [floats], {"to": tensor.dtype}), int64_constant(tape, *sizes)])
    narrow.shape, narrow.type = ir.Shape(sizes), ir.TensorType(tensor.dtype)
    graph.insert_before(next(iter(graph)), tape.nodes)
    ir.convenience.replace_all_uses_with(parameter, narrow)
    del graph.initializers[name]


def _corrections_or_zeros(parts: Parts) -> Array:
    """`zero_point_corrections`, or zeros where there are no zero points."""
    return zero_point_corrections(parts) if "zero_points" in parts else np.zeros(parts["weight"].shape[:2], np.float32)
