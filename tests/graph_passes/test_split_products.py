"""A product that yields several things side by side, one of them for a convolution, becomes a product for each."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.split_products import SplitProductsPass
from tests.graph_passes.running import replaced, run_model, with_parameters

SIZES = "<int64[3] sizes = {5, 6, 3}>"
BEFORE = f"""<ir_version: 10, opset_import: ["" : 27]>
layer (float[B,S,8] x, float[14,8] w, float[6,1,4] c, float[B,6,3] conv) => (float[B,S,5] gate, float[B,6,S] y, float[B,S,3] step)
{SIZES}
{{
    turned = Transpose <perm = [1, 0]> (w)  rows = MatMul (x, turned)
    gate, channels, step = Split <axis = -1> (rows, sizes)
    columns = Transpose <perm = [0, 2, 1]> (channels)  y, present = CausalConvWithState (columns, c, , conv)
}}"""
INPUTS_FIRST = replaced(
    BEFORE, ("turned = Transpose <perm = [1, 0]> (w)  rows = MatMul (x, turned)", "rows = MatMul (x, w)"), ("[14,8]", "[8,14]")
)
CAST = replaced(
    BEFORE,
    (
        "columns = Transpose <perm = [0, 2, 1]> (channels)",
        "wide = Cast <to = 1> (channels)  columns = Transpose <perm = [0, 2, 1]> (wide)",
    ),
)
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((14, 8), dtype=np.float32)


def _graph(text: str) -> ir.Model:
    model = with_parameters(text, {"w": WEIGHT if "turned" in text else WEIGHT.T.copy()})
    ir.passes.common.ShapeInferencePass()(model)
    for name, size in (("gate", 5), ("channels", 6), ("step", 3)):  # as traced
        value = next(value for node in model.graph for value in node.outputs if value.name == name)
        value.shape, value.type = ir.Shape(["B", "S", size]), ir.TensorType(ir.DataType.FLOAT)
    rows = next(value for node in model.graph for value in node.outputs if value.name == "rows")
    rows.shape, rows.type = ir.Shape(["B", "S", 14]), ir.TensorType(ir.DataType.FLOAT)
    return model


@pytest.mark.parametrize("text", [BEFORE, INPUTS_FIRST, CAST], ids=["outputs first", "inputs first", "cast to fp32"])
def test_each_part_has_a_product_of_its_own_with_the_same_result(text: str) -> None:
    before, after = _graph(text), _graph(text)
    assert SplitProductsPass()(after).modified
    kinds = [node.op_type for node in after.graph]
    assert kinds.count("MatMul") == 3 and "Split" not in kinds
    assert {name for name in after.graph.initializers if "w" in name} == {f"layer.w.from_{start}" for start in (0, 5, 11)}
    feeds = {"x": RNG.standard_normal((2, 3, 8), dtype=np.float32), "c": RNG.standard_normal((6, 1, 4), dtype=np.float32)}
    feeds["conv"] = RNG.standard_normal((2, 6, 3), dtype=np.float32)
    for expected, found in zip(run_model(before, feeds), run_model(after, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not SplitProductsPass()(after).modified


@pytest.mark.parametrize(
    "change",
    [
        ("y, present = CausalConvWithState (columns, c, , conv)", "y = Identity (columns)"),
        ("rows = MatMul (x, turned)", "product = MatMul (x, turned)  rows = Add (product, product)"),
        ("Split <axis = -1>", "Split <axis = 1>"),
        ("gate, channels, step =", "other = Neg (rows)  gate, channels, step ="),
    ],
    ids=["no convolution", "not a product", "a split of tokens", "a product that is read as a whole, too"],
)
def test_other_products_and_other_splits_are_left_alone(change: tuple[str, str]) -> None:
    assert not SplitProductsPass()(_graph(replaced(BEFORE, change))).modified
