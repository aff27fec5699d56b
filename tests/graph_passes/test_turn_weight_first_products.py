"""A weight times transposed rows becomes rows times the transposed weight."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.turn_weight_first_products import TurnWeightFirstProductsPass
from tests.graph_passes.running import run_model, with_parameters

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
layer (float[B,S,4] x, float[6,4] w) => (float[B,S,6] y)
{
    turned = Transpose <perm = [0, 2, 1]> (x)
    product = MatMul (w, turned)
    y = Transpose <perm = [0, 2, 1]> (product)
}
"""
RNG = np.random.default_rng(0)
WEIGHT, ROWS = (RNG.standard_normal(shape).astype(np.float32) for shape in ((6, 4), (2, 3, 4)))


def test_rows_come_first_and_the_weight_keeps_its_stored_form() -> None:
    model = with_parameters(BEFORE, {"w": WEIGHT})
    before = run_model(model, {"x": ROWS})
    assert TurnWeightFirstProductsPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Transpose", "MatMul"]
    (parameter,) = model.graph.initializers.values()
    np.testing.assert_array_equal(parameter.const_value.numpy(), WEIGHT)  # type: ignore[union-attr]
    np.testing.assert_allclose(run_model(model, {"x": ROWS})[0], before[0], rtol=0, atol=1e-6)
    assert not TurnWeightFirstProductsPass()(model).modified


def test_a_product_that_others_read_stays() -> None:
    model = with_parameters(BEFORE.replace("y)\n", "y, float[B,6,S] product)\n"), {"w": WEIGHT})
    before = run_model(model, {"x": ROWS})
    assert TurnWeightFirstProductsPass()(model).modified
    for found, expected in zip(run_model(model, {"x": ROWS}), before, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "model",
    [ir.from_onnx_text(BEFORE), with_parameters(BEFORE.replace("[0, 2, 1]> (product)", "[2, 0, 1]> (product)"), {"w": WEIGHT})],
    ids=["no parameter", "turned in another way"],
)
def test_other_products_stay(model: ir.Model) -> None:
    assert not TurnWeightFirstProductsPass()(model).modified
