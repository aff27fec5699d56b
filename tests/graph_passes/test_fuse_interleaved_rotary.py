"""A decomposed rotary embedding of neighbouring numbers becomes one operator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.fuse_interleaved_rotary import FuseInterleavedRotaryPass
from tests.graph_passes.running import run_model, with_shapes

_TURNED = """even = Slice (h, zero, most, three, two)  odd = Slice (h, one, most, three, two)  minus = Neg (odd)
   left = Unsqueeze (minus, last)  right = Unsqueeze (even, last)  pairs = Concat <axis = -1> (left, right)
   turned = Reshape (pairs, heads)  a = Mul (h, cos4)  b = Mul (turned, sin4)  y = Add (a, b)"""
_ANGLES = """apart = Unsqueeze (f, three)  both = Expand (apart, pair)  angles = Reshape (both, flat)
   cosine = Cos (angles)  cos4 = Unsqueeze (cosine, one)  sine = Sin (angles)  sin4 = Unsqueeze (sine, one)"""
_TABLES = """angles = Concat <axis = -1> (f, f)
   cosine = Cos (angles)  cos_h = Unsqueeze (cosine, one)  cos_f = Slice (cos_h, zero, four, three, one)
   cos_a = Unsqueeze (cos_f, four)  cos_b = Expand (cos_a, pair5)  cos4 = Reshape (cos_b, flat4)
   sine = Sin (angles)  sin_h = Unsqueeze (sine, one)  sin_f = Slice (sin_h, zero, four, three, one)
   sin_a = Unsqueeze (sin_f, four)  sin_b = Expand (sin_a, pair5)  sin4 = Reshape (sin_b, flat4)"""
_CONSTANTS = """<int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] three = {3}, int64[1] four = {4},
 int64[1] last = {-1}, int64[1] most = {9223372036854775807}, int64[4] heads = {0, 2, 0, 8}, int64[3] flat = {0, 0, 8},
 int64[4] flat4 = {0, 1, 0, 8}, int64[4] pair = {1, 1, 1, 2}, int64[5] pair5 = {1, 1, 1, 1, 2}>"""
_HEAD = '<ir_version: 10, opset_import: ["" : 24]>'
FORMS = {
    form: f"{_HEAD} g (float[B,2,S,8] h, float[B,S,4] f) => (float[B,2,S,8] y) {_CONSTANTS} {{ {tables} {_TURNED} }}"
    for form, tables in {"angles twice": _ANGLES, "tables twice": _TABLES}.items()
}
PART = f"""{_HEAD} g (float[B,2,S,12] x, float[B,S,4] f) => (float[B,2,S,12] z)
{_CONSTANTS[:-1]}, int64[1] eight = {{8}}> {{ h = Slice (x, zero, eight, three, one)  rest = Slice (x, eight, most, three, one)
   {_TABLES} {_TURNED} z = Concat <axis = -1> (y, rest) }}"""


def _feeds(name: str, size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {name: (1, 2, 3, size), "f": (1, 3, 4)}
    return {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}


@pytest.mark.parametrize("form", FORMS)
def test_either_form_becomes_one_operator_with_the_same_result(form: str) -> None:
    before, after = ir.from_onnx_text(FORMS[form]), ir.from_onnx_text(FORMS[form])
    assert FuseInterleavedRotaryPass()(after).modified
    assert [node.op_type for node in after.graph] == ["Cos", "Sin", "RotaryEmbedding"]
    (expected,), (found,) = (run_model(model, _feeds("h", 8)) for model in (before, after))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_the_unrotated_part_of_a_head_passes_through_the_operator() -> None:
    before, after = ir.from_onnx_text(PART), with_shapes(PART)
    assert FuseInterleavedRotaryPass()(after).modified
    assert [node.op_type for node in after.graph] == ["Cos", "Sin", "RotaryEmbedding"]
    (expected,), (found,) = (run_model(model, _feeds("x", 12)) for model in (before, after))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [("left, right", "right, left"), ("(cos_h, zero, four, three, one)", "(cos_h, four, most, three, one)"),
     ("minus = Neg (odd)", "minus = Abs (odd)")],
    ids=["other way round", "second half of the table", "no turn"],
)  # fmt: skip
def test_it_declines_anything_but_a_rotation_of_neighbours(old: str, new: str) -> None:
    text = FORMS["tables twice"].replace(old, new)
    assert text != FORMS["tables twice"]
    assert not FuseInterleavedRotaryPass()(ir.from_onnx_text(text)).modified
