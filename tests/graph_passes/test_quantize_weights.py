"""Matrices become block-quantised ones."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.quantization import METHODS, Quantization
from skipdecode.graph_passes.quantize_weights import QuantizeWeightsPass
from tests.graph_passes.running import Array, relative_error, run_model, with_parameters
from tests.graph_passes.test_clean_trace import with_weight

FORMS = {
    "linear": ("turned = Transpose <perm = [1, 0]> (weight)\n y = MatMul (x, turned)", (24, 64)),
    "linear with bias": (
        "turned = Transpose <perm = [1, 0]> (weight)\n made = MatMul (x, turned)\n y = Add (bias, made)",
        (24, 64),
    ),
    "conv1d": ("y = MatMul (x, weight)", (64, 24)),
    "gemm": ("flat = Reshape (x, two)\n made = Gemm <transB = 1> (flat, weight, bias)\n y = Reshape (made, back)", (24, 64)),
}


def quantisable(form: str, weight: Array | None = None) -> ir.Model:
    """A graph of this form, x [B,S,64] to y [B,S,24], with this weight or a random one."""
    body, shape = FORMS[form]
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
    g (float[B,S,64] x) => (float[B,S,24] y)
    <int64[2] two = {{-1, 64}}, int64[3] back = {{1, -1, 24}}, float[24] bias = {{{", ".join(["0.5"] * 24)}}}> {{ {body} }}"""
    random = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return with_weight(text, "layer.fc.weight", random if weight is None else weight)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.02), (4, 0.2)])
def test_every_form_of_a_matrix_is_quantised_within_tolerance(form: str, method: str, bits: int, tolerance: float) -> None:
    before, after = quantisable(form), quantisable(form)
    assert QuantizeWeightsPass(Quantization(bits=bits, method=method))(after).modified
    (product,) = (node for node in after.graph if node.domain)
    assert product.op_type == "MatMulNBits"
    assert product.attributes["accuracy_level"].as_int() == 4, "in int8: 15 times as fast, the same numbers"
    assert not any(node.op_type in ("MatMul", "Gemm", "Transpose", "Add") for node in after.graph)
    x = np.random.default_rng(1).standard_normal((1, 3, 64)).astype(np.float32)
    (expected,), (found,) = run_model(before, {"x": x}), run_model(after, {"x": x})
    assert 0 < relative_error(found, expected) < tolerance


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        ("y = Add (made, bias)  bare = Neg (made)", "float[B,S,24] y, float[B,S,24] bare"),
        ("y = Add (made, bias)", "float[B,S,24] y, float[B,S,24] made"),
        ("y = Add (made, one)", "float[B,S,24] y"),
        ("y = Add (made, made)", "float[B,S,24] y"),
    ],
    ids=["the product is read", "the product is an output", "another width", "no bias"],
)
def test_what_is_added_stays_outside_where_it_is_no_bias_or_the_product_is_needed_without_it(body: str, outputs: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
    g (float[B,S,64] x) => ({outputs}) <float[24] bias = {{{", ".join(["0.5"] * 24)}}}, float[1] one = {{1}}>
    {{ turned = Transpose <perm = [1, 0]> (weight)  made = MatMul (x, turned)  {body} }}"""
    weight = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)
    before, after = (with_weight(text, "layer.fc.weight", weight) for _ in range(2))
    QuantizeWeightsPass(Quantization(bits=8))(after)
    (product,) = (node for node in after.graph if node.domain)
    assert product.op_type == "MatMulNBits" and "bias" not in [value and value.name for value in product.inputs]
    x = np.random.default_rng(1).standard_normal((1, 3, 64)).astype(np.float32)
    for expected, found in zip(run_model(before, {"x": x}), run_model(after, {"x": x}), strict=True):
        assert relative_error(found, expected) < 0.02


def test_it_declines_when_the_width_is_not_a_multiple_of_the_block() -> None:
    model = quantisable("linear")
    assert not QuantizeWeightsPass(Quantization(bits=8, block_size=128))(model).modified
    assert [node.op_type for node in model.graph] == ["Transpose", "MatMul"]


@pytest.mark.parametrize("setting", ["alpha = 0.5", "beta = 2.0", "transA = 1"])
def test_it_declines_a_gemm_that_does_more_than_multiply_and_add(setting: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
    g (float[24] bias, float[B,64] x) => (float[B,24] y) {{ y = Gemm <transB = 1, {setting}> (x, weight, bias) }}"""
    model = with_weight(text, "layer.fc.weight", np.ones((24, 64), np.float32))
    assert not QuantizeWeightsPass(Quantization(bits=4))(model).modified


def test_a_second_run_changes_nothing() -> None:
    model = quantisable("linear")
    QuantizeWeightsPass(Quantization(bits=4))(model)
    assert not QuantizeWeightsPass(Quantization(bits=4))(model).modified


@pytest.mark.parametrize("second", ["turned", "again"])
def test_a_matrix_that_two_products_share_is_left_as_it_is(second: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
    g (float[B,64] x) => (float[B,64] y) {{
        turned = Transpose <perm = [1, 0]> (weight)  again = Transpose <perm = [1, 0]> (weight)
        middle = MatMul (x, turned)  y = MatMul (middle, {second}) }}"""
    model = with_weight(text, "layer.fc.weight", np.zeros((64, 64), np.float32))
    assert not QuantizeWeightsPass(Quantization(bits=4))(model).modified


def test_a_mixtures_router_is_left_as_it_is_but_not_what_makes_its_rows() -> None:
    text = """<ir_version: 10, opset_import: ["" : 24, "com.microsoft" : 1]>
    g (float[T,64] x, float[64,64] attended, float[64,4] router, float[4,64,64] up, float[4,64,64] down) => (float[T,64] y) {
        rows = MatMul (x, attended)  scores = MatMul (rows, router)
        y = com.microsoft.MoE <k = 2> (rows, scores, up, , down) }"""
    arrays = {"attended": np.ones((64, 64), np.float32), "router": np.ones((64, 4), np.float32)}
    model = with_parameters(text, arrays)
    assert QuantizeWeightsPass(Quantization(bits=4))(model).modified
    assert [node.op_type for node in model.graph] == ["MatMulNBits", "MatMul", "MoE"]


def test_the_search_for_a_router_visits_each_value_once() -> None:
    """A value that is added to itself again and again has 2**60 paths to the output."""
    sums = " ".join(f"y{index + 1} = Add (y{index}, y{index})" for index in range(60))
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
    g (float[B,64] x) => (float[B,24] y60) {{ turned = Transpose <perm = [1, 0]> (weight)  y0 = MatMul (x, turned)  {sums} }}"""
    model = with_weight(text, "layer.fc.weight", np.zeros((24, 64), np.float32))
    assert QuantizeWeightsPass(Quantization(bits=4))(model).modified
