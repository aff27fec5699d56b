"""A decomposed norm without weights becomes one operator."""

from __future__ import annotations

import numpy as np
import pytest

from skipdecode.graph_passes.fuse_unit_norm import FuseUnitNormPass
from tests.graph_passes.running import run_model, with_shapes

NORM = """<ir_version: 10, opset_import: ["" : 24]>
g (float[B,8] x) => (float[B,8] y) <float two = {2.0}, float epsilon = {0.001}, int64[1] last = {-1}>
{ squares = Pow (x, two)  mean = ReduceMean <keepdims = 1, noop_with_empty_axes = 0> (squares, last)
  more = Add (mean, epsilon)  root = Sqrt (more)  inverse = Reciprocal (root)  y = Mul (x, inverse) }"""


def test_it_becomes_one_operator_with_the_same_result() -> None:
    before, after = with_shapes(NORM), with_shapes(NORM)
    assert FuseUnitNormPass()(after).modified
    assert [node.op_type for node in after.graph] == ["Constant", "RMSNormalization"]
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32) * 0.1}
    (expected,), (found,) = run_model(before, feeds), run_model(after, feeds)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("float two = {2.0}", "float two = {3.0}"),
        ("last = {-1}", "last = {0}"),
        ("(float[B,8] x)", "(float[B,W] x)"),
        ("<float two = {2.0}, float epsilon = {0.001},", "<float two = {2.0},"),
    ],
    ids=["another power", "another axis", "size not static", "epsilon not constant"],
)
def test_it_declines_anything_but_such_a_norm(old: str, new: str) -> None:
    text = NORM.replace(old, new).replace("(float[B,8] y)", "(float[B,W] y)")
    if "epsilon = {" not in text:
        text = text.replace("(float[B,8] x)", "(float[B,8] x, float epsilon)")
    assert not FuseUnitNormPass()(with_shapes(text)).modified


def test_a_second_run_changes_nothing() -> None:
    model = with_shapes(NORM)
    FuseUnitNormPass()(model)
    assert not FuseUnitNormPass()(model).modified
