"""A rotary embedding before heads are transposed to the front becomes one operator behind the transpose."""

from __future__ import annotations

import numpy as np
import pytest

from skipdecode.graph_passes.fuse_tokens_first_rotary import FuseTokensFirstRotaryPass
from tests.graph_passes.running import run_model, with_shapes

ROTATED = """<ir_version: 10, opset_import: ["" : 24]>
g (float[B,S,2,8] x, float[B,S,4] f) => (float[B,2,S,8] y)
<int64[1] two = {2}, int64[1] zero = {0}, int64[1] middle = {4}, int64[1] end = {9223372036854775807}, int64[1] three = {3},
 int64[1] one = {1}>
{
    angles = Concat <axis = -1> (f, f)
    cosine = Cos (angles)  cos = Unsqueeze (cosine, two)
    sine = Sin (angles)  sin = Unsqueeze (sine, two)
    first = Slice (x, zero, middle, three, one)
    second = Slice (x, middle, end, three, one)
    minus = Neg (second)
    turned = Concat <axis = -1> (minus, first)
    a = Mul (x, cos)  b = Mul (turned, sin)
    rotated = Add (a, b)
    y = Transpose <perm = [0, 2, 1, 3]> (rotated)
}"""


def test_it_becomes_one_operator_with_the_same_result() -> None:
    before, after = with_shapes(ROTATED), with_shapes(ROTATED)
    assert FuseTokensFirstRotaryPass()(after).modified
    assert sorted(node.op_type for node in after.graph) == ["Cos", "RotaryEmbedding", "Sin", "Transpose"]
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 3, 2, 8)).astype(np.float32), "f": rng.standard_normal((2, 3, 4)).astype(np.float32)}
    (expected,), (found,) = run_model(before, feeds), run_model(after, feeds)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[0, 2, 1, 3]", "[0, 1, 3, 2]"),
        ("two = {2}", "two = {1}"),
        ("middle = {4}", "middle = {3}"),
        ("(minus, first)", "(first, minus)"),
        ("float[B,S,2,8] x", "float[B,S,N,8] x"),
    ],
    ids=["another turn", "other tables", "cut elsewhere", "other way round", "heads not static"],
)
def test_it_declines_anything_but_such_a_rotation(old: str, new: str) -> None:
    text = ROTATED.replace(old, new).replace("(float[B,2,S,8] y)", "(float[B,N,S,M] y)")
    assert not FuseTokensFirstRotaryPass()(with_shapes(text)).modified


def test_a_second_run_changes_nothing() -> None:
    model = with_shapes(ROTATED)
    FuseTokensFirstRotaryPass()(model)
    assert not FuseTokensFirstRotaryPass()(model).modified
