"""Two parts written into an empty tensor become one Concat."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.concat_parts import ConcatPartsPass
from tests.graph_passes.running import run_model, with_shapes


def _written(out: str, rows: str, part: str, start: str, end: str) -> str:
    return f"""{out}_s = Shape (rows)  {out}_d = Gather ({out}_s, axis)  {out}_r = Range (none, {out}_d, step)
    {out}_p = Slice ({out}_r, {start}, {end}, zero, one)  {out}_i = Unsqueeze ({out}_p, last)
    {out}_a = Transpose <perm = [3, 1, 2, 0]> (rows)  {out}_b = Transpose <perm = [3, 1, 2, 0]> ({part})
    {out}_n = ScatterND ({out}_a, {out}_i, {out}_b)  {out} = Transpose <perm = [3, 1, 2, 0]> ({out}_n)
    """.replace("(rows)", f"({rows})")


BEFORE = f"""<ir_version: 10, opset_import: ["" : 24]>
g (float[B,4,S,16] a, float[B,4,S,8] b, int64[4] shape) => (float[B,4,S,24] y)
<int64 none = {{0}}, int64 step = {{1}}, int64 axis = {{3}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] last = {{-1}},
 int64[1] middle = {{16}}, int64[1] most = {{9223372036854775807}}>
{{
    empty = ConstantOfShape (shape)
    {_written("part", "empty", "a", "zero", "middle")}
    {_written("y", "part", "b", "middle", "most")}
}}"""


NARROW = BEFORE.replace("empty = ConstantOfShape (shape)", "wide = ConstantOfShape (shape)  empty = Cast <to = 1> (wide)")


@pytest.mark.parametrize("text", [BEFORE, NARROW], ids=["as it is", "cast"])
def test_the_parts_become_one_concat_with_the_same_result(text: str) -> None:
    before, after = with_shapes(text), with_shapes(text)
    assert ConcatPartsPass()(after).modified
    assert [node.op_type for node in after.graph] == ["Concat"]
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 4, 3, size)).astype(np.float32) for name, size in (("a", 16), ("b", 8))}
    feeds["shape"] = np.array([2, 4, 3, 24])
    (expected,), (found,) = (run_model(model, feeds) for model in (before, after))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [("float[B,4,S,24] y", "float[B,4,S,25] y"), ("middle = {16}", "middle = {17}"), ("float[B,4,S,8] b", "float[B,4,S,N] b")],
    ids=["a gap behind", "a gap between", "a width that is not static"],
)
def test_parts_that_do_not_fill_the_tensor_stay(old: str, new: str) -> None:
    assert BEFORE.count(old) == 1
    model = ir.from_onnx_text(BEFORE.replace(old, new))
    assert not ConcatPartsPass()(model).modified
    assert sum(node.op_type == "ScatterND" for node in model.graph) == 2


def test_a_second_run_changes_nothing() -> None:
    model = with_shapes(BEFORE)
    ConcatPartsPass()(model)
    assert not ConcatPartsPass()(model).modified
