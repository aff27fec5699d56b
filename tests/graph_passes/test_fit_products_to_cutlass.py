"""Products with quantised weights are fitted to CUTLASS; the CPU's operator compares the results."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.fit_products_to_cutlass import FitProductsToCutlassPass
from skipdecode.graph_passes.quantization import METHODS, Quantization
from skipdecode.graph_passes.quantize_weights import QuantizeWeightsPass
from tests.graph_passes.running import run_model, with_parameters

EVEN, UNEVEN = 128, 96


def _quantised(width: int, bits: int, method: str = "rtn", body: str = "m = MatMul (x, weight)  y = Add (m, bias)") -> ir.Model:
    weight = np.random.default_rng(0).standard_normal((width, 24)).astype(np.float32)
    model = with_parameters(
        f"""<ir_version: 10, opset_import: ["" : 24]>
        g (float[B,{width}] x, float[{width},24] weight) => (float[B,24] y)
        <float[24] bias = {{{", ".join(["0.5"] * 24)}}}> {{ {body} }}""",
        {"weight": weight},
    )
    assert QuantizeWeightsPass(Quantization(bits=bits, method=method))(model).modified
    return model


def _assert_same(before: ir.Model, after: ir.Model, width: int) -> None:
    x = np.random.default_rng(1).standard_normal((3, width)).astype(np.float32)
    (expected,), (found,) = (run_model(model, {"x": x}) for model in (before, after))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [EVEN, UNEVEN])
def test_a_bias_becomes_a_separate_add(width: int, bits: int, method: str) -> None:
    before, after = (_quantised(width, bits, method) for _ in range(2))
    assert [node.op_type for node in before.graph] == ["MatMulNBits"]
    assert FitProductsToCutlassPass()(after).modified
    assert [node.op_type for node in after.graph] == ["MatMulNBits", "Add"]
    _assert_same(before, after, width)


@pytest.mark.parametrize("bits", [8, 4])
def test_only_an_uneven_width_gets_zero_points(bits: int) -> None:
    for width, inputs in ((EVEN, 3), (UNEVEN, 4)):
        before, after = (_quantised(width, bits, body="y = MatMul (x, weight)") for _ in range(2))
        assert FitProductsToCutlassPass()(after).modified is (width == UNEVEN)
        (product,) = after.graph
        assert len(product.inputs) == inputs
        _assert_same(before, after, width)


def test_existing_zero_points_stay() -> None:
    model = _quantised(UNEVEN, 4, "k-quant", "y = MatMul (x, weight)")
    (product,) = model.graph
    assert product.inputs[3] is not None and not FitProductsToCutlassPass()(model).modified
