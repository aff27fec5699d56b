"""Weight-only quantisation in standard operators, for TensorRT, which reads the levels as they are stored.

    MatMul(x, Transpose(W)) or MatMul(x, W) or Gemm(x, W, bias)  ->  MatMul(x, DequantizeLinear(levels, scales)) [+ bias]

4-bit levels have one scale per block of inputs, 8-bit levels one per output. TensorRT-RTX 1.7.1 fuses either form with its
product into one kernel, but would write out a matrix of 8-bit blocks as floats in every step (its builder's list of kernels).
4-bit levels are stored [N,K], as ONNX Runtime's quantiser yields them, and transposed in the graph. 8-bit levels are stored
[K,N], because a plan would hold transposed ones twice.

TensorRT takes only levels whose zero is the middle one. For other zero points (k-quant's, AWQ's) a second product, with the sum
of each block's inputs, adds what is missing:

    x (levels - zero) scale  =  x (levels - 8) scale + sum(x) (8 - zero) scale

A step of two Llama layers then takes 36 kernels instead of 22, and reads one more number per block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from skipdecode.graph_passes.conventions import add_constant, int64_constant, required_input
from skipdecode.graph_passes.kept_levels import Floats, kept_levels
from skipdecode.graph_passes.mapped import release_pages
from skipdecode.graph_passes.quantization import Parts, Quantization
from skipdecode.graph_passes.quantize_weights import as_rows, quantisable_products

logger = logging.getLogger(__name__)
Array = np.ndarray[Any, np.dtype[Any]]
Store = Callable[[str, Array], ir.Value]  # name suffix, numbers (uint8: pairs of 4-bit levels) -> initializer
_MIDDLE_LEVELS = 0x88  # the middle level, 8, in both halves of a byte; XOR with it makes 4-bit levels signed
_ROWS_AT_A_TIME = 1024


class QuantizePlanWeightsPass(ir.passes.InPlacePass):
    """Quantises the weights of products.

    Declines what `quantisable_products` leaves out; in 8 bits, with one scale per output, any number of inputs will do.
    """

    def __init__(self, quantization: Quantization) -> None:
        super().__init__()
        self.quantization = quantization

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        count = 0
        for node, parameter, transposed in quantisable_products(
            model.graph, self.quantization.block_size if self.quantization.bits == 4 else 1
        ):
            _replace(model.graph, node, parameter, transposed, self.quantization)
            release_pages(parameter.const_value)
            count += 1
        if count:
            RemoveUnusedNodesPass()(model)
        logger.info("quantised %d matrices to %d bits", count, self.quantization.bits)
        return ir.passes.PassResult(model, bool(count))


def _replace(graph: ir.Graph, node: ir.Node, parameter: ir.Value, transposed: bool, quantization: Quantization) -> None:
    assert parameter.const_value is not None
    weight, tape, rows, float_dtype = as_rows(parameter, transposed), Tape(), required_input(node), parameter.const_value.dtype

    def store(suffix: str, numbers: Array) -> ir.Value:
        name = f"{parameter.name}.quantised.{suffix}"
        if numbers.dtype == np.uint8:
            packed, shape = numbers.reshape(-1), ir.Shape(weight.shape)
            tensor: ir.TensorProtocol = ir.PackedTensor(packed, ir.DataType.INT4, shape=shape, name=name)
        else:
            tensor = ir.tensor(numbers.astype(float_dtype.numpy()) if numbers.dtype == np.float32 else numbers, name=name)
        return add_constant(graph, tensor)

    if quantization.bits == 4:
        product = _multiply_in_4_bits(tape, rows, quantization.quantise(weight), quantization.block_size, store)
    else:
        product = _multiply_in_8_bits(tape, rows, weight, float_dtype, store)
    if node.op_type == "Gemm" and len(node.inputs) > 2:
        product = tape.op("Add", [product, required_input(node, 2)])
    ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [product])


def _multiply_in_4_bits(tape: Tape, rows: ir.Value, parts: Parts, block: int, store: Store) -> ir.Value:
    outputs, blocks, _ = parts["weight"].shape
    scales = parts["scales"].reshape(outputs, blocks)
    levels = store("levels", as_int4(parts))
    matrix = tape.op("DequantizeLinear", [levels, store("scales", scales)], {"axis": 1, "block_size": block})
    product = tape.op("MatMul", [rows, tape.op("Transpose", [matrix], {"perm": [1, 0]})])
    if "zero_points" not in parts:
        return product
    corrections = store("missing", np.ascontiguousarray(zero_point_corrections(parts).T))
    correction = tape.op("MatMul", [_block_sums(tape, rows, block), corrections])
    return tape.op("Add", [product, correction])


def as_int4(parts: Parts) -> Array:
    """Packed 4-bit levels less 8, that is, as INT4."""
    return parts["weight"] ^ np.uint8(_MIDDLE_LEVELS)


def zero_point_corrections(parts: Parts) -> Floats:
    """(8 - zero) * scale of each block, [N, K / block]."""
    outputs, blocks, _ = parts["weight"].shape
    pairs = parts["zero_points"]
    zeros = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(outputs, -1)[:, :blocks]
    corrections: Floats = (8 - zeros.astype(np.float32)) * parts["scales"].reshape(outputs, blocks)
    return corrections


def _block_sums(tape: Tape, rows: ir.Value, block: int) -> ir.Value:
    """The sum of each block of rows [..,K]: [..,K / block]."""
    assert rows.shape is not None
    blocks = tape.op("Reshape", [rows, int64_constant(tape, *[0] * (len(rows.shape) - 1), -1, block)])
    return tape.op("ReduceSum", [blocks, int64_constant(tape, -1)], {"keepdims": 0})


def _multiply_in_8_bits(tape: Tape, rows: ir.Value, weight: Floats, float_dtype: ir.DataType, store: Store) -> ir.Value:
    levels, scales = quantise_by_output(weight, float_dtype)
    transposed = store("levels", np.ascontiguousarray(levels.T))
    return tape.op("MatMul", [rows, tape.op("DequantizeLinear", [transposed, store("scales", scales)], {"axis": 1})])


def quantise_by_output(weight: Floats, stored_dtype: ir.DataType) -> tuple[Array, Floats]:
    """Quantise a matrix [N,K] to int8 [N,K] with one scale per output [N], exact in `stored_dtype`; rows on levels keep them."""
    outputs, inputs = weight.shape
    levels, scales = np.empty(weight.shape, np.int8), np.empty(outputs, np.float32)
    min_scale = float(np.nextafter(stored_dtype.numpy().type(0), stored_dtype.numpy().type(1)))  # TensorRT refuses a scale of 0
    for start in range(0, outputs, _ROWS_AT_A_TIME):
        part = slice(start, start + _ROWS_AT_A_TIME)
        largest = np.abs(weight[part]).max(axis=1)
        scales[part] = np.where(largest == 0, 1, np.maximum(_rounded_up(largest / 127, stored_dtype), min_scale))
        levels[part] = np.rint(weight[part] / scales[part, None])
    kept = kept_levels(weight, 8, inputs)
    if kept is not None:
        rows = kept.rows & (kept.zeros[:, 0] == 128)
        levels[rows] = (kept.levels[rows, 0] ^ np.uint8(128)).view(np.int8)
        scales[rows] = np.maximum(kept.scales[rows, 0], min_scale)
    return levels, scales


def _rounded_up(numbers: Floats, stored_dtype: ir.DataType) -> Floats:
    """The numbers rounded up to what `stored_dtype` can hold."""
    nearest = numbers.astype(stored_dtype.numpy())
    above = np.nextafter(nearest, stored_dtype.numpy().type(np.inf))
    rounded: Floats = np.where(nearest.astype(np.float32) < numbers, above, nearest).astype(np.float32)
    return rounded
