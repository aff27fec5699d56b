"""A rotary embedding written separately for each half of a head becomes one operator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.fuse_halves_rotary import FuseHalvesRotaryPass
from tests.graph_passes.running import run_model, with_shapes

HALVES = """<ir_version: 10, opset_import: ["" : 24]>
g (float[B,2,S,8] h, float[B,S,4] f) => (float[B,2,S,8] y) <int64[1] one = {1}, float factor = {1.25}>
{
    cosine = Cos (f)  cos = Mul (cosine, factor)  cos_4 = Unsqueeze (cos, one)
    sine = Sin (f)  sin = Mul (sine, factor)  sin_4 = Unsqueeze (sin, one)
    first, second = Split <axis = 3, num_outputs = 2> (h)
    a = Mul (first, cos_4)  b = Mul (second, sin_4)  left = Sub (a, b)
    c = Mul (second, cos_4)  d = Mul (first, sin_4)  right = Add (c, d)
    y = Concat <axis = -1> (left, right)
}"""

# the even and the odd numbers take the place of the halves
NEIGHBOURS = HALVES.replace(
    "<int64[1] one = {1},",
    """<int64[1] one = {1}, int64[1] zero = {0}, int64[1] two = {2}, int64[1] three = {3},
 int64[1] most = {9223372036854775807},""",
).replace(
    "first, second = Split <axis = 3, num_outputs = 2> (h)",
    "first = Slice (h, zero, most, three, two)  second = Slice (h, one, most, three, two)",
)


def test_neighbours_are_gathered_into_halves_and_become_one_operator() -> None:
    before, after = with_shapes(NEIGHBOURS), with_shapes(NEIGHBOURS)
    assert FuseHalvesRotaryPass()(after).modified
    kinds = [node.op_type for node in after.graph if node.op_type not in ("Constant", "Cos", "Mul", "Sin")]
    assert kinds == ["Gather", "RotaryEmbedding"]
    _assert_same(before, after)


def test_it_becomes_one_operator_with_the_same_result() -> None:
    before, after = with_shapes(HALVES), with_shapes(HALVES)
    assert FuseHalvesRotaryPass()(after).modified
    assert [node.op_type for node in after.graph] == ["Cos", "Mul", "Sin", "Mul", "RotaryEmbedding"]
    _assert_same(before, after)


def _assert_same(before: ir.Model, after: ir.Model) -> None:
    rng = np.random.default_rng(0)
    feeds = {"h": rng.standard_normal((1, 2, 3, 8)).astype(np.float32), "f": rng.standard_normal((1, 3, 4)).astype(np.float32)}
    (expected,), (found,) = run_model(before, feeds), run_model(after, feeds)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [("(left, right)", "(right, left)"), ("Sub (a, b)", "Sub (b, a)"), ("float[B,2,S,8] h", "float[B,N,S,8] h")],
    ids=["other way round", "turned back", "heads not static"],
)
@pytest.mark.parametrize("text", [HALVES, NEIGHBOURS], ids=["halves", "neighbours"])
def test_it_declines_anything_but_such_a_rotation(text: str, old: str, new: str) -> None:
    assert not FuseHalvesRotaryPass()(with_shapes(text.replace(old, new))).modified


def test_a_second_run_changes_nothing() -> None:
    model = with_shapes(HALVES)
    FuseHalvesRotaryPass()(model)
    assert not FuseHalvesRotaryPass()(model).modified
