"""A mixture with an activation that ONNX Runtime's operator has not, for a CPU: a branch an expert, which a step takes or leaves.

    Sum over E of (MatMul(Gelu(gate) * up, W_down) * ScatterElements(0, chosen, weights))
    -> total = 0; for each expert: total = If(a token has a share of it, total + its product by their shares, total)

Each expert has matrices of its own, which ONNX Runtime packs and maps as others, and a branch reads from outside. The experts of
a layer of Gemma 4 26B-A4B in int4 (8 of 128, 2816 x 704) take 2.0 to 2.4 ms a step, where `QMoE` takes 1.7 with the activation
that it has, SwiGLU; of 64 tokens 45 and 43 ms (random weights, AMD EPYC, 2 cores, processes taking turns).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape
from onnxscript import rewriter

from skipdecode.graph_passes.conventions import MS_DOMAIN, static_dim
from skipdecode.graph_passes.explicit_experts import READ_SHARE
from skipdecode.graph_passes.lower_experts import GeluExperts
from skipdecode.graph_passes.mapped import release_pages
from skipdecode.graph_passes.quantization import Quantization
from skipdecode.graph_passes.quantize_weights import product_attributes

logger = logging.getLogger(__name__)
Array = np.ndarray[Any, np.dtype[Any]]
Product = Callable[[Tape, ir.Value], ir.Value]  # rows [R,K] -> [R,N]


class BranchExpertsPass(ir.passes.InPlacePass):
    """Takes gated experts with a GELU; leaves other mixtures to `lower_experts`.

    Args:
        how: their matrices are quantised; None: they stay as they are.
    """

    def __init__(self, how: Quantization | None) -> None:
        super().__init__()
        self.how = how

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = rewriter.RewritePass([_Branches.rule(self.how)])(model).modified
        if modified:
            if self.how is not None:
                model.graph.opset_imports[MS_DOMAIN] = 1
            RemoveUnusedNodesPass()(model)
        logger.info("branched %d experts", sum(node.op_type == "If" for node in model.graph))
        return ir.passes.PassResult(model, modified)


class _Branches(GeluExperts):
    def __init__(self, how: Quantization | None) -> None:
        super().__init__()
        self._how = how

    def rewrite(
        self, op: Any, x: ir.Value, zeros: ir.Value, chosen: ir.Value, weights: ir.Value, gate_up: ir.Value, down: ir.Value
    ) -> Any:
        count = static_dim(gate_up, 0)
        shares = op.ScatterElements(zeros, chosen, weights, axis=1)
        taken = op.ReduceMax(op.Cast(op.Cast(shares, to=ir.DataType.BOOL), to=ir.DataType.INT32), _integers(op, 0), keepdims=0)
        each = op.Split(op.Cast(taken, to=ir.DataType.BOOL), axis=0, num_outputs=count, _outputs=count)
        total = op.Expand(op.Constant(value=ir.tensor(np.zeros(1, np.float32))), op.Shape(x))
        products = zip(self._products(op, gate_up, chosen), self._products(op, down, chosen), strict=True)
        for expert, ((up_product, down_product), is_taken) in enumerate(zip(products, each, strict=True)):
            name = f"{gate_up.name}.{expert}"
            taking = _taking(f"{name}.taken", expert, x, shares, total, up_product, down_product)
            total = op.If(is_taken, then_branch=taking, else_branch=_leaving(f"{name}.left", total))
            total.shape, total.type = x.shape, x.type
        return total

    def _products(self, op: Any, parameter: ir.Value, chosen: ir.Value) -> list[Product]:
        """By each expert's matrix of a parameter [E,N,K]."""
        tensor = parameter.const_value
        assert tensor is not None
        experts, outputs, inputs = tensor.shape.numpy()
        share, read = static_dim(chosen, 1) / experts, _one_by_one(tensor)

        def stored(made: ir.TensorProtocol) -> ir.Value:
            value: ir.Value = op.initializer(made)
            value.meta[READ_SHARE] = share
            return value

        def plain(expert: int) -> Product:
            name = f"{parameter.name}.{expert}"
            matrix = stored(
                ir.LazyTensor(
                    lambda: ir.tensor(read(expert).T.copy(), name=name),
                    dtype=tensor.dtype, shape=ir.Shape([inputs, outputs]), name=name,
                )
            )  # fmt: skip
            return lambda tape, rows: tape.op("MatMul", [rows, matrix])

        def quantised(expert: int, how: Quantization) -> Product:
            parts = how.parts(np.asarray(read(expert), dtype=np.float32))
            tensors = (ir.tensor(numbers, name=f"{parameter.name}.{expert}.{part}") for part, numbers in parts.items())
            values, attributes = [stored(each) for each in tensors], product_attributes(outputs, inputs, how)
            return lambda tape, rows: tape.op("MatMulNBits", [rows, *values], attributes, domain=MS_DOMAIN)

        return [plain(expert) if self._how is None else quantised(expert, self._how) for expert in range(experts)]


def _one_by_one(tensor: ir.TensorProtocol) -> Callable[[int], Array]:
    """Gives each matrix of a tensor [E,N,K], in turn; a tensor that is cast as it is read is read once for all of them."""
    held: Array | None = None

    def read(expert: int) -> Array:
        nonlocal held
        held = tensor.numpy() if held is None else held
        matrix: Array = held[expert].copy()
        if expert == len(held) - 1:
            held = None
            release_pages(tensor)
        return matrix

    return read


def _taking(
    name: str, expert: int, x: ir.Value, shares: ir.Value, total: ir.Value, up_product: Product, down_product: Product
) -> ir.Graph:
    """What an expert that some of the rows x [T,H] have a share [T,E] of adds to theirs in `total` [T,H]."""
    tape = Tape()
    column = tape.op("Gather", [shares, _constant(tape, np.array(expert))], {"axis": 1})
    rows = tape.op("Squeeze", [tape.op("NonZero", [column]), _constant(tape, np.array([0]))])
    gate, up = tape.op_multi_out(
        "Split", [up_product(tape, tape.op("Gather", [x, rows]))], {"axis": 1, "num_outputs": 2}, num_outputs=2
    )
    inner = tape.op("Mul", [tape.op("Gelu", [gate], {"approximate": "tanh"}), up])
    last = _constant(tape, np.array([1]))
    share = tape.op("Unsqueeze", [tape.op("Gather", [column, rows]), last])
    added = tape.op("Mul", [down_product(tape, inner), share])
    places = tape.op("Unsqueeze", [rows, last])
    return _graph(name, tape, tape.op("ScatterND", [total, places, added], {"reduction": "add"}), total)


def _leaving(name: str, total: ir.Value) -> ir.Graph:
    tape = Tape()
    return _graph(name, tape, tape.op("Identity", [total]), total)


def _graph(name: str, tape: Tape, output: ir.Value, like: ir.Value) -> ir.Graph:
    """A branch; its values' names are in no other one, nor outside."""
    for index, value in enumerate(value for node in tape.nodes for value in node.outputs):
        value.name = f"{name}.{index}"
    output.shape, output.type = like.shape, like.type
    return ir.Graph([], [output], nodes=tape.nodes, name=name)


def _constant(tape: Tape, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> ir.Value:
    return tape.op("Constant", [], {"value": ir.tensor(numbers)})


def _integers(op: Any, *numbers: int) -> Any:
    return op.Constant(value_ints=[*numbers])
