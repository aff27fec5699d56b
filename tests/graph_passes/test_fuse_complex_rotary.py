"""A rotary embedding written as a product of complex numbers becomes one operator."""

from __future__ import annotations

import numpy as np
import pytest

from skipdecode.graph_passes.fuse_complex_rotary import FuseComplexRotaryPass
from tests.graph_passes.running import run_model, with_shapes

PRODUCT = """<ir_version: 10, opset_import: ["" : 24]>
g (float[B,2,S,8] x, float[B,S,4,2] table) => (float[B,2,S,8] y)
<int64[5] pairs = {0, 0, 0, 4, 2}, int64[4] heads = {0, 0, 0, 8}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2},
 int64[1] last = {-1}>
{
    z = Reshape (x, pairs)  real = Slice (z, zero, one, last)  imaginary = Slice (z, one, two, last)
    each = Unsqueeze (table, one)  cos = Slice (each, zero, one, last)  sin = Slice (each, one, two, last)
    a = Mul (real, cos)  b = Mul (imaginary, sin)  left = Sub (a, b)
    c = Mul (real, sin)  d = Mul (imaginary, cos)  right = Add (c, d)
    both = Concat <axis = -1> (left, right)  y = Reshape (both, heads)
}"""


def test_it_becomes_one_operator_with_the_same_result() -> None:
    before, after = with_shapes(PRODUCT), with_shapes(PRODUCT)
    assert FuseComplexRotaryPass()(after).modified
    kinds = [node.op_type for node in after.graph if node.op_type != "Constant"]
    assert kinds == ["Split", "Squeeze", "Squeeze", "RotaryEmbedding"]
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 2, 3, 8)).astype(np.float32), "table": rng.random((2, 3, 4, 2)).astype(np.float32)}
    (expected,), (found,) = run_model(before, feeds), run_model(after, feeds)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Sub (a, b)", "Sub (b, a)"),
        ("Mul (real, sin)", "Mul (real, cos)"),
        ("(left, right)", "(right, left)"),
        ("[B,2,S,8]", "[B,N,S,8]"),
        ("{0, 0, 0, 8}", "{0, 0, 8, -1}"),
        ("float[B,S,4,2] table", "float[B,S,1,2] table"),
    ],
    ids=["other difference", "no product", "other way round", "heads not static", "another shape", "one angle for all"],
)
def test_it_declines_anything_but_a_rotation_of_each_pair(old: str, new: str) -> None:
    assert not FuseComplexRotaryPass()(with_shapes(PRODUCT.replace(old, new))).modified


def test_a_second_run_changes_nothing() -> None:
    model = with_shapes(PRODUCT)
    FuseComplexRotaryPass()(model)
    assert not FuseComplexRotaryPass()(model).modified
