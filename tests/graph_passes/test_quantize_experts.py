"""Experts in fp32 become block-quantised ones."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.lower_experts import LowerExpertsPass
from skipdecode.graph_passes.quantization import METHODS, Quantization
from skipdecode.graph_passes.quantize_experts import QuantizeExpertsPass
from skipdecode.graph_passes.quantize_weights import QuantizeWeightsPass
from tests.graph_passes.running import Array, relative_error, run_model, with_parameters
from tests.graph_passes.test_kept_levels import stored
from tests.graph_passes.test_lower_experts import BIASED, GRAPH, feeds, mixture

WIDTH, INNER = 128, 64
WIDE, WIDE_BIASED = (
    graph.replace("float[T,8]", "float[T,128]")
    .replace("float[5,8,8]", "float[5,128,128]")
    .replace("float[5,8,4]", "float[5,128,64]")
    .replace("float[5,4,8]", "float[5,64,128]")
    .replace("float[5,8]", "float[5,128]")
    for graph in (GRAPH, BIASED)
)
PRODUCT = """<ir_version: 10, opset_import: ["" : 24]>
g (float[B,K] x, float[N,K] w) => (float[B,N] y) { turned = Transpose <perm = [1, 0]> (w)  y = MatMul (x, turned) }"""
ROUTER = """<ir_version: 10, opset_import: ["" : 24]>
g (float[T,64] x, float[32,64] w, float[64,64] v) => (int64[T,2] chosen, float[T,64] y) <int64[1] two = {2}>
{
    logits = Gemm <transB = 1> (x, w)
    scores = Softmax (logits)
    best, chosen = TopK (scores, two)
    turned = Transpose <perm = [1, 0]> (v)
    y = MatMul (x, turned)
}
"""
ROUTED = """<ir_version: 10, opset_import: ["" : 24, "com.microsoft" : 1]>
g (float[T,32] x, float[5,32] w, float[5,8,32] up, float[5,32,4] down) => (float[T,32] y)
{ logits = Gemm <transB = 1> (x, w)  y = com.microsoft.MoE <k = 2> (x, logits, up, , down) }"""


def _lowered(text: str = WIDE) -> ir.Model:
    model = mixture(text, width=WIDTH, inner=INNER)
    LowerExpertsPass()(model)
    return model


def _restored(weight: Array, how: Quantization) -> Array:
    """The numbers that quantised matrices [E,N,K] stand for, found by multiplying with the identity."""
    return np.stack([_columns(matrix, how) for matrix in weight])


def _columns(matrix: Array, how: Quantization) -> Array:
    model = with_parameters(PRODUCT, {"w": matrix})
    QuantizeWeightsPass(how)(model)
    model.graph[0].attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)  # exact activations
    (columns,) = run_model(model, {"x": np.eye(matrix.shape[1], dtype=np.float32)})
    return columns.T


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("bits", "block"), [(4, 32), (8, 32), (4, 64)])
def test_experts_are_quantised_like_each_of_their_matrices_alone(bits: int, block: int, method: str) -> None:
    how = Quantization(bits=bits, block_size=block, method=method)
    plain, quantised = _lowered(), _lowered()
    assert QuantizeExpertsPass(how)(quantised).modified
    assert "MoE" not in [node.op_type for node in quantised.graph]
    for name in ("layer.gate_up.interleaved", "layer.down"):
        value = plain.graph.initializers[name]
        assert value.const_value is not None
        value.const_value = ir.tensor(_restored(value.const_value.numpy(), how), name=name)
    given = feeds((0.75, 0.25), WIDTH)
    (expected,), (found,) = run_model(plain, given), run_model(quantised, given)
    assert relative_error(found, expected) < 0.02  # activations are rounded to 8 bits


@pytest.mark.parametrize("method", METHODS)
def test_biases_are_not_quantised(method: str) -> None:
    how = Quantization(bits=8, method=method)
    plain, quantised = _lowered(WIDE_BIASED), _lowered(WIDE_BIASED)
    QuantizeExpertsPass(how)(quantised)
    (node,) = [node for node in quantised.graph if node.op_type == "QMoE"]
    assert [node.inputs[index] and node.inputs[index].name for index in (4, 7)] == ["layer.up_bias", "layer.down_bias"]  # type: ignore[union-attr]
    given = feeds((0.75, 0.25), WIDTH)
    given["x"] *= 0.1  # so that a few gates are clamped, not most
    (expected,), (found,) = run_model(plain, given), run_model(quantised, given)
    assert relative_error(found, expected) < 0.02


def test_scales_have_the_rows_dtype() -> None:
    drawn = {name: np.ones(shape, np.float16) for name, shape in (("w", (5, 32)), ("up", (5, 64, 32)), ("down", (5, 32, 32)))}
    text = ROUTED.replace("float[", "float16[").replace("[5,8,32]", "[5,64,32]").replace("[5,32,4]", "[5,32,32]")
    model = with_parameters(text, drawn)
    QuantizeExpertsPass(Quantization(bits=8))(model)
    (node,) = [node for node in model.graph if node.op_type == "QMoE"]
    assert {value.dtype for value in node.inputs[2:] if value is not None} == {ir.DataType.FLOAT16, ir.DataType.UINT8}


def test_the_operators_own_router_is_not_quantised() -> None:
    drawn = {name: np.ones(shape, np.float32) for name, shape in (("w", (5, 32)), ("up", (5, 8, 32)), ("down", (5, 32, 4)))}
    model = with_parameters(ROUTED, drawn)
    QuantizeWeightsPass(Quantization(bits=4))(model)
    assert [node.op_type for node in model.graph] == ["Gemm", "MoE"]


def test_a_separate_router_is_not_quantised() -> None:
    model = with_parameters(ROUTER, {"w": np.ones((32, 64), np.float32), "v": np.ones((64, 64), np.float32)})
    QuantizeWeightsPass(Quantization(bits=4))(model)
    assert sorted(node.op_type for node in model.graph) == ["Gemm", "MatMulNBits", "Softmax", "TopK"]


@pytest.mark.parametrize("symmetric", [5, 4, 0], ids=["all centred", "all but one", "none"])
def test_experts_keep_the_levels_of_a_quantised_checkpoint(symmetric: int) -> None:
    plain, quantised = _lowered(), _lowered()
    for name, (rows, inputs) in {"layer.gate_up.interleaved": (2 * INNER, WIDTH), "layer.down": (WIDTH, INNER)}.items():
        drawn = [stored(4, 64, symmetric=expert < symmetric, seed=expert, rows=rows, inputs=inputs) for expert in range(5)]
        for model in (plain, quantised):
            model.graph.initializers[name].const_value = ir.tensor(np.stack(drawn), name=name)
    QuantizeExpertsPass(Quantization(bits=4))(quantised)
    (node,) = [node for node in quantised.graph if node.op_type == "QMoE"]
    assert (len(node.inputs) > 8) is (symmetric < 5)  # zero points
    given = feeds((0.75, 0.25), WIDTH)
    (expected,), (found,) = run_model(plain, given), run_model(quantised, given)
    assert relative_error(found, expected) < 0.02  # activations are rounded to 8 bits
