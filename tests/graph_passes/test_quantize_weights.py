"""Matrices before, block-quantised ones after."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.quantize_weights import METHODS, Quantization, QuantizeWeightsPass
from tests.graph_passes.running import Array, run_model
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
def test_every_form_of_a_matrix_is_quantised_within_its_error(form: str, method: str, bits: int, tolerance: float) -> None:
    before, after = quantisable(form), quantisable(form)
    assert QuantizeWeightsPass(Quantization(bits=bits, method=method))(after).modified
    assert [node.op_type for node in after.graph if node.domain] == ["MatMulNBits"]
    assert not any(node.op_type in ("MatMul", "Gemm", "Transpose", "Add") for node in after.graph)
    x = np.random.default_rng(1).standard_normal((1, 3, 64)).astype(np.float32)
    (expected,), (found,) = run_model(before, {"x": x}), run_model(after, {"x": x})
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert 0 < error < tolerance


def test_it_declines_when_the_width_is_no_multiple_of_the_block() -> None:
    model = quantisable("linear")
    assert not QuantizeWeightsPass(Quantization(bits=8, block_size=128))(model).modified
    assert [node.op_type for node in model.graph] == ["Transpose", "MatMul"]


@pytest.mark.parametrize("setting", ["alpha = 0.5", "beta = 2.0", "transA = 1"])
def test_it_declines_a_gemm_that_does_more_than_multiply_and_add(setting: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
    g (float[24] bias, float[B,64] x) => (float[B,24] y) {{ y = Gemm <transB = 1, {setting}> (x, weight, bias) }}"""
    model = with_weight(text, "layer.fc.weight", np.ones((24, 64), np.float32))
    assert not QuantizeWeightsPass(Quantization(bits=4))(model).modified


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("least", [0.0, 0.01, 0.015, 0.02])
def test_the_search_keeps_numbers_of_one_sign(least: float, sign: int, bits: int) -> None:
    """Blocks whose levels would have to begin elsewhere than at zero, up to those of a single number."""
    weight = sign * np.random.default_rng(0).uniform(least, 0.02, (24, 64)).astype(np.float32)
    text = """<ir_version: 10, opset_import: ["" : 24]>
    g (float[B,64] x) => (float[B,24] y) { turned = Transpose <perm = [1, 0]> (weight)  y = MatMul (x, turned) }"""
    model = with_weight(text, "layer.fc.weight", weight)
    QuantizeWeightsPass(Quantization(bits=bits, method="k-quant"))(model)
    model.graph[0].attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)  # exact activations
    (found,) = run_model(model, {"x": np.eye(64, dtype=np.float32)})
    assert np.linalg.norm(found.T - weight) / np.linalg.norm(weight) < (0.05 if bits == 4 else 0.003)


def test_a_second_run_changes_nothing() -> None:
    model = quantisable("linear")
    QuantizeWeightsPass(Quantization(bits=4))(model)
    assert not QuantizeWeightsPass(Quantization(bits=4))(model).modified


def test_the_search_leaves_a_smaller_error_than_rounding() -> None:
    """Weights whose blocks are not centred on 0, with an odd number of blocks a row."""
    rng = np.random.default_rng(2)
    weight = (rng.standard_normal((40, 96)) + 0.5 * rng.standard_normal((40, 1))).astype(np.float32)
    x = np.eye(96, dtype=np.float32)
    errors = {}
    for method, quantise in METHODS.items():
        parts = quantise(weight, 4, 32)
        assert parts["weight"].shape == (40, 3, 16) and parts["scales"].shape == (120,)
        assert "zero_points" not in parts or parts["zero_points"].shape == (40, 2)
        text = """<ir_version: 10, opset_import: ["" : 24]>
        g (float[B,96] x) => (float[B,40] y) { turned = Transpose <perm = [1, 0]> (weight)  y = MatMul (x, turned) }"""
        model = with_weight(text, "layer.fc.weight", weight)
        QuantizeWeightsPass(Quantization(bits=4, method=method))(model)
        (found,) = run_model(model, {"x": x})
        errors[method] = np.linalg.norm(found.T - weight) / np.linalg.norm(weight)
    assert errors["k-quant"] < 0.9 * errors["rtn"], errors


@pytest.mark.parametrize("method", METHODS)
def test_a_row_of_zeros_stays_one_and_says_nothing(method: str) -> None:
    """As an embedding has for its padding token."""
    weight = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)
    weight[7] = 0
    text = """<ir_version: 10, opset_import: ["" : 24]>
    g (float[B,64] x) => (float[B,24] y) { turned = Transpose <perm = [1, 0]> (weight)  y = MatMul (x, turned) }"""
    model = with_weight(text, "layer.fc.weight", weight)
    QuantizeWeightsPass(Quantization(bits=4, method=method))(model)
    (found,) = run_model(model, {"x": np.eye(64, dtype=np.float32)})
    assert not found[:, 7].any() and found.any()


def test_a_matrix_is_quantised_some_rows_at_a_time_with_the_same_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's quantiser ends the process where a table has 2**31 numbers, as Gemma 4's per-layer inputs do."""
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

    weight = np.random.default_rng(0).standard_normal((2500, 64)).astype(np.float32)
    for bits in (4, 8):
        config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=True, accuracy_level=4, bits=bits)
        whole, scales, _ = DefaultWeightOnlyQuantizer(config).qbits_block_quant(np.ascontiguousarray(weight.T))
        rows, quantise = [], DefaultWeightOnlyQuantizer.qbits_block_quant

        def counted(self: Any, turned: Array, rows: list[int] = rows, quantise: Any = quantise) -> Any:
            rows.append(turned.shape[1])
            return quantise(self, turned)

        with monkeypatch.context() as patch:
            patch.setattr(DefaultWeightOnlyQuantizer, "qbits_block_quant", counted)
            parts = METHODS["rtn"](weight, bits, 32)
        assert rows == [*[256] * 9, 196]
        np.testing.assert_array_equal(parts["weight"], whole)
        np.testing.assert_array_equal(parts["scales"], scales.reshape(-1))


def test_a_router_is_looked_for_once_along_each_way() -> None:
    """What is summed with itself over and over has 2**60 ways to its end."""
    sums = " ".join(f"y{index + 1} = Add (y{index}, y{index})" for index in range(60))
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
    g (float[B,64] x) => (float[B,24] y60) {{ turned = Transpose <perm = [1, 0]> (weight)  y0 = MatMul (x, turned)  {sums} }}"""
    model = with_weight(text, "layer.fc.weight", np.zeros((24, 64), np.float32))
    assert QuantizeWeightsPass(Quantization(bits=4))(model).modified
