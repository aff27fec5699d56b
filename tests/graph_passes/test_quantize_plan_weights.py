"""Matrices become levels and the operators that turn levels into floats."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import ShapeInferencePass

from skipdecode.graph_passes.quantization import METHODS, Quantization
from skipdecode.graph_passes.quantize_plan_weights import QuantizePlanWeightsPass
from skipdecode.graph_passes.quantize_weights import QuantizeWeightsPass
from tests.graph_passes.running import Array, run_model
from tests.graph_passes.test_quantize_weights import FORMS, quantisable

X = np.eye(64, dtype=np.float32)[None]  # the identity, whose product is the matrix


def _linear(weight: Array, bits: int, block: int = 32) -> tuple[ir.Model, Array]:
    """A graph after the pass, and the matrix [24,64] that its levels stand for."""
    model = quantisable("linear", weight)
    assert QuantizePlanWeightsPass(Quantization(bits=bits, block_size=block))(model).modified
    (found,) = run_model(model, {"x": X})
    return model, found[0].T


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block", [32, 64])
def test_in_4_bits_every_form_matches_onnx_runtimes_own_operator(form: str, method: str, block: int) -> None:
    how = Quantization(bits=4, block_size=block, method=method)
    model, theirs = quantisable(form), quantisable(form)
    ShapeInferencePass()(model)
    assert QuantizePlanWeightsPass(how)(model).modified and QuantizeWeightsPass(how)(theirs).modified
    assert {node.domain for node in model.graph} == {""}
    assert "Gemm" not in [node.op_type for node in model.graph]
    x = np.random.default_rng(1).standard_normal((1, 3, 64)).astype(np.float32)
    for node in theirs.graph:
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)  # rows as floats
    (expected,), (found,) = run_model(theirs, {"x": x}), run_model(model, {"x": x})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_in_8_bits_every_form_is_within_half_a_level_per_output(form: str) -> None:
    before, after = quantisable(form), quantisable(form)
    weight = next(value.const_value.numpy() for value in before.graph.initializers.values() if value.name == "layer.fc.weight")
    rows = weight if weight.shape == (24, 64) else weight.T
    assert QuantizePlanWeightsPass(Quantization(bits=8))(after).modified
    (expected,), (found,) = run_model(before, {"x": X}), run_model(after, {"x": X})
    half = np.abs(rows).max(axis=1) / 127 / 2
    assert 0 < (np.abs(found - expected)[0] / half).max() < 1.01


def test_levels_and_scales_have_the_form_that_tensorrt_fuses() -> None:
    weight = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)
    for bits, kind, shape, scales in ((4, ir.DataType.INT4, [24, 64], [24, 2]), (8, ir.DataType.INT8, [64, 24], [24])):
        model, _ = _linear(weight, bits)
        found = {name.rsplit(".", 1)[-1]: value for name, value in model.graph.initializers.items()}
        assert found.keys() == {"levels", "scales"}, "no zero points"
        assert (found["levels"].dtype, list(found["levels"].shape or ())) == (kind, shape)
        assert list(found["scales"].shape or ()) == scales


@pytest.mark.parametrize("zeros", [8, 5])
def test_4_bit_levels_of_a_matrix_are_kept_whatever_their_zero_point(zeros: int) -> None:
    """As GPTQ and AWQ leave them."""
    rng = np.random.default_rng(0)
    scales = rng.uniform(0.01, 0.02, (24, 2, 1))
    levels = rng.integers(0, 16, (24, 2, 32))
    levels[..., :2] = 0, 15
    weight = ((levels - zeros) * scales).reshape(24, 64).astype(np.float32)
    model, found = _linear(weight, 4)
    assert any(name.endswith("missing") for name in model.graph.initializers) == (zeros != 8)
    np.testing.assert_allclose(found, weight, atol=1e-5)


def test_8_bit_levels_of_an_output_are_kept() -> None:
    rng = np.random.default_rng(0)
    levels = rng.integers(-100, 101, (24, 64))  # the largest level is not the last one, but rounding would make it that
    weight = (levels * rng.uniform(0.01, 0.02, (24, 1))).astype(np.float32)
    np.testing.assert_allclose(_linear(weight, 8)[1], weight, atol=1e-6)


def test_8_bit_levels_with_another_zero_point_are_rounded() -> None:
    rng = np.random.default_rng(0)
    levels = rng.integers(0, 256, (24, 64))
    levels[:, :2] = 0, 255
    weight = ((levels - 100) * rng.uniform(0.01, 0.02, (24, 1))).astype(np.float32)
    half_a_level = np.abs(weight).max(1, keepdims=True) / 127 / 2
    assert (np.abs(_linear(weight, 8)[1] - weight) <= 1.01 * half_a_level).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_of_zeros_stays_zero(bits: int) -> None:
    weight = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)
    weight[7] = 0
    found = _linear(weight, bits)[1]
    assert not found[7].any() and found[8].any()


@pytest.mark.parametrize("largest", [1e-7, 1e-6, 1e-5, 1e-3])
def test_8_bit_levels_belong_to_the_scale_that_is_stored(largest: float) -> None:
    """In fp16 the scale of an output of small numbers has few digits and may round to 0, which TensorRT refuses."""
    weight = np.random.default_rng(0).uniform(-largest, largest, (24, 64)).astype(np.float16)
    model = quantisable("linear", weight)
    assert QuantizePlanWeightsPass(Quantization(bits=8))(model).modified
    levels, scales = (model.graph.initializers[f"layer.fc.weight.quantised.{part}"].const_value for part in ("levels", "scales"))
    assert levels is not None and scales is not None and scales.dtype == ir.DataType.FLOAT16
    found, each = levels.numpy().T.astype(np.float32), scales.numpy().astype(np.float32)[:, None]
    assert (each > 0).all()
    assert (np.abs(found * each - weight.astype(np.float32)) <= 0.501 * each).all()
    most = np.abs(weight.astype(np.float32)).max(axis=1, keepdims=True) / 127
    assert (each <= most + 2.0**-24).all(), "no larger than necessary"


def test_in_4_bits_it_declines_a_width_that_is_not_a_multiple_of_the_block() -> None:
    model = quantisable("linear")
    assert not QuantizePlanWeightsPass(Quantization(bits=4, block_size=128))(model).modified
    assert QuantizePlanWeightsPass(Quantization(bits=8, block_size=128))(model).modified, "8 bits have no blocks"


def test_a_product_without_a_parameter_is_left_alone() -> None:
    text = """<ir_version: 10, opset_import: ["" : 24]>
    g (float[B,64] x, float[64,24] y) => (float[B,24] z) { z = MatMul (x, y) }"""
    assert not QuantizePlanWeightsPass(Quantization(bits=8))(ir.from_onnx_text(text)).modified
