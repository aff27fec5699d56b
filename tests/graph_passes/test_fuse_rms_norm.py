"""A decomposed norm becomes one operator whose inputs and output have one type."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.fuse_rms_norm import FuseRMSNormPass
from tests.graph_passes.running import run_model, with_shapes

NORM = """<ir_version: 10, opset_import: ["" : 24]>
g (float[B,8] x) => (float[B,8] y)
<float two = {2.0}, float epsilon = {0.001}, int64[1] last = {-1}, float[8] scale = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}>
{ squares = Pow (x, two)  mean = ReduceMean <keepdims = 1, noop_with_empty_axes = 0> (squares, last)
  more = Add (mean, epsilon)  root = Sqrt (more)  inverse = Reciprocal (root)  normed = Mul (x, inverse)
  y = Mul (scale, normed) }"""
NARROW_ROWS = NORM.replace("(float[B,8] x)", "(float16[B,8] rows)").replace("{ squares", "{ x = Cast <to = 1> (rows)  squares")
NARROW_SCALE = NORM.replace("(float[B,8] y)", "(float16[B,8] y)").replace(
    "y = Mul (scale, normed)", "narrow = Cast <to = 10> (scale)  less = Cast <to = 10> (normed)  y = Mul (narrow, less)"
)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (NORM, ["RMSNormalization"]),
        (NARROW_ROWS, ["Cast", "RMSNormalization"]),
        (NARROW_SCALE, ["Cast", "Cast", "RMSNormalization", "Cast"]),
    ],
    ids=["one type", "narrow rows", "a narrow scale"],
)
def test_it_becomes_one_operator_of_the_wider_type(text: str, kinds: list[str]) -> None:
    before, after = with_shapes(text), with_shapes(text)
    assert FuseRMSNormPass()(after).modified
    assert [node.op_type for node in after.graph] == kinds
    (norm,) = [node for node in after.graph if node.op_type == "RMSNormalization"]
    assert {value.dtype for value in (*norm.inputs, *norm.outputs) if value is not None} == {ir.DataType.FLOAT}
    rows = before.graph.inputs[0]
    numbers = np.random.default_rng(0).standard_normal((3, 8))
    # fp32 rows hold numbers too large for fp16
    feeds = {str(rows.name): (numbers if rows.dtype == ir.DataType.FLOAT16 else numbers * 1e6).astype(rows.dtype.numpy())}  # type: ignore[union-attr]
    (expected,), (found,) = run_model(before, feeds), run_model(after, feeds)
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    assert not FuseRMSNormPass()(after).modified


@pytest.mark.parametrize("factor", ["float[B,1]", "float[B,8]", "float[1]", "float"])
def test_only_one_weight_per_number_is_taken_for_the_scale(factor: str) -> None:
    text = NORM.replace("(float[B,8] x)", f"(float[B,8] x, {factor} factor)").replace("Mul (scale", "Mul (factor")
    assert not FuseRMSNormPass()(with_shapes(text)).modified


def test_groups_may_have_weights_of_their_own() -> None:
    text = NORM.replace("float[B,8]", "float[B,2,8]").replace("float[8] scale = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}",
                        "float[2,8] scale = {1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 6, 5, 4, 3, 2, 1}")  # fmt: skip
    before, after = with_shapes(text), with_shapes(text)
    assert FuseRMSNormPass()(after).modified
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 2, 8), dtype=np.float32)}
    np.testing.assert_allclose(run_model(after, feeds)[0], run_model(before, feeds)[0], rtol=1e-5)
