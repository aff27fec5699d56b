"""A decomposed rotary embedding whose tables are cast becomes one operator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.fuse_narrow_rotary import FuseNarrowRotaryPass
from tests.graph_passes import test_fuse_interleaved_rotary as interleaved
from tests.graph_passes import test_fuse_tokens_first_rotary as tokens_first
from tests.graph_passes.running import run_model, with_shapes

_HALF = "x1 = Slice (h, zero, four, three, one)  x2 = Slice (h, four, most, three, one)  minus = Neg (x2)"
ROTARY = f"""<ir_version: 10, opset_import: ["" : 24]>
g (float16[B,2,S,8] h, float[B,S,4] f) => (float16[B,2,S,8] y)
<int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] three = {{3}}, int64[1] four = {{4}},
 int64[1] most = {{9223372036854775807}}>
{{ twice = Concat <axis = -1> (f, f)
   cosine = Cos (twice)  cosine16 = Cast <to = 10> (cosine)  cos4 = Unsqueeze (cosine16, one)
   sine = Sin (twice)  sine16 = Cast <to = 10> (sine)  sin4 = Unsqueeze (sine16, one)
   {_HALF}  turned = Concat <axis = -1> (minus, x1)
   a = Mul (h, cos4)  b = Mul (turned, sin4)  y = Add (a, b) }}"""


def _with_tables_cast(text: str) -> str:
    for function, name in (("Cos", "cosine"), ("Sin", "sine")):
        wide = f"{name} = {function} (angles)"
        text = text.replace(wide, f"{name}32 = {function} (angles)  {name} = Cast <to = 10> ({name}32)")
    return text


NEIGHBOURS = _with_tables_cast(interleaved.FORMS["tables twice"].replace("float[B,2,S,8]", "float16[B,2,S,8]"))
TOKENS_FIRST = tokens_first.ROTATED.replace("float[B,S,2,8]", "float16[B,S,2,8]").replace("float[B,2,S,8]", "float16[B,2,S,8]")
TOKENS_FIRST = _with_tables_cast(TOKENS_FIRST)

# models that rotate in fp32 whatever their dtype: they cast a head's numbers, before or after swapping them, and the sum back
_WIDE = "h32 = Cast <to = 1> (h)  turned32 = Cast <to = 1> (turned)  a = Mul (h32, cos4)  b = Mul (turned32, sin4)"
_SUM = "sum = Add (a, b)  y = Cast <to = 10> (sum)"
_IN_PLACE = ("a = Mul (h, cos4)  b = Mul (turned, sin4)", "y = Add (a, b)")
WIDE_HALVES = ROTARY.replace(_IN_PLACE[0], _WIDE).replace(_IN_PLACE[1], _SUM)
WIDE_NEIGHBOURS = interleaved.FORMS["tables twice"].replace("float[B,2,S,8]", "float16[B,2,S,8]")
WIDE_NEIGHBOURS = WIDE_NEIGHBOURS.replace(_IN_PLACE[0], _WIDE).replace(_IN_PLACE[1], _SUM)
WIDE_ANGLES = interleaved.FORMS["angles twice"].replace("float[B,2,S,8]", "float16[B,2,S,8]").replace("(h,", "(h32,")
WIDE_ANGLES = WIDE_ANGLES.replace("apart =", "h32 = Cast <to = 1> (h)  apart =").replace(_IN_PLACE[1], _SUM)
WIDE_BY_NARROW_TABLES = ROTARY.replace("(h,", "(h32,").replace("x1 =", "h32 = Cast <to = 1> (h)  x1 =")
WIDE_BY_NARROW_TABLES = WIDE_BY_NARROW_TABLES.replace(_IN_PLACE[1], _SUM)
for _function, _name, _table in (("Cos", "cosine", "cos4"), ("Sin", "sine", "sin4")):
    WIDE_HALVES = WIDE_HALVES.replace(f"{_name}16 = Cast <to = 10> ({_name})  ", "").replace(
        f"({_name}16, one)", f"({_name}, one)"
    )
    WIDE_BY_NARROW_TABLES = WIDE_BY_NARROW_TABLES.replace(
        f"{_table} = Unsqueeze ({_name}16, one)",
        f"{_table}16 = Unsqueeze ({_name}16, one)  {_table} = Cast <to = 1> ({_table}16)",
    )
    WIDE_ANGLES = WIDE_ANGLES.replace(
        f"{_table} = Unsqueeze ({_name}, one)",
        f"{_name}16 = Cast <to = 10> ({_name})  {_table}16 = Unsqueeze ({_name}16, one)  {_table} = Cast <to = 1> ({_table}16)",
    )
FORMS = {
    "halves": ROTARY, "neighbours": NEIGHBOURS, "halves in fp32": WIDE_HALVES, "neighbours in fp32": WIDE_NEIGHBOURS,
    "halves in fp32 by narrow tables": WIDE_BY_NARROW_TABLES, "neighbours in fp32 by narrow tables": WIDE_ANGLES,
}  # fmt: skip


def _model(text: str) -> ir.Model:
    model = ir.from_onnx_text(text)
    halves_type = ir.DataType.FLOAT if "Slice (h32" in text else ir.DataType.FLOAT16
    for value in (out for node in model.graph for out in node.outputs if out.name in ("x1", "x2")):
        value.shape, value.type = ir.Shape(["B", 2, "S", 4]), ir.TensorType(halves_type)
    return model


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_it_becomes_one_operator_with_the_same_result(text: str) -> None:
    before, after = _model(text), _model(text)
    assert FuseNarrowRotaryPass()(after).modified
    assert [node.op_type for node in after.graph] == ["Cos", "Cast", "Sin", "Cast", "RotaryEmbedding"]
    rng = np.random.default_rng(0)
    feeds = {"h": rng.standard_normal((1, 2, 3, 8)).astype(np.float16), "f": rng.standard_normal((1, 3, 4)).astype(np.float32)}
    (expected,), (found,) = run_model(before, feeds), run_model(after, feeds)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-3)


def test_it_becomes_one_operator_behind_the_transpose_of_heads() -> None:
    before, after = with_shapes(TOKENS_FIRST), with_shapes(TOKENS_FIRST)
    assert FuseNarrowRotaryPass()(after).modified
    assert sorted(node.op_type for node in after.graph) == ["Cast", "Cast", "Cos", "RotaryEmbedding", "Sin", "Transpose"]
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 3, 2, 8)).astype(np.float16), "f": rng.standard_normal((2, 3, 4)).astype(np.float32)}
    (expected,), (found,) = run_model(before, feeds), run_model(after, feeds)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize("text", [ROTARY, WIDE_HALVES, WIDE_BY_NARROW_TABLES], ids=["narrow", "in fp32", "by narrow tables"])
@pytest.mark.parametrize(("old", "new"), [("minus, x1", "x1, minus"), ("four, most", "one, most")], ids=["other half", "uneven"])
def test_it_declines_anything_but_a_rotation(text: str, old: str, new: str) -> None:
    assert not FuseNarrowRotaryPass()(_model(text.replace(old, new))).modified
