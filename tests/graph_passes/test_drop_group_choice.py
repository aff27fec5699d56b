"""A router's choice of groups is dropped where it chooses all of them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.drop_group_choice import DropGroupChoicePass
from tests.graph_passes.running import run_model, with_shapes

ROUTER = """<ir_version: 10, opset_import: ["" : 24]>
g (float[T,6] scores) => (float[T,6] y)
<int64[3] apart = {-1, 2, 3}, int64[1] all = {2}, int64[1] last = {-1}, int64[3] each = {1, 1, 3}, int64[2] flat = {-1, 6},
 float lowest = {-1.0}>
{
    grouped = Reshape (scores, apart)  groups = ReduceMax <keepdims = 0> (grouped, last)
    values, chosen = TopK <axis = -1, sorted = 0> (groups, all)
    shape = Shape (groups)  zeros = ConstantOfShape <value = float[1] {0.0}> (shape)
    marks = Shape (chosen)  ones = ConstantOfShape <value = float[1] {1.0}> (marks)
    mask = ScatterElements <axis = 1> (zeros, chosen, ones)  spread = Unsqueeze (mask, last)
    of_each = Expand (spread, each)  of_all = Reshape (of_each, flat)
    known = Cast <to = 9> (of_all)  others = Not (known)  y = Where (others, lowest, scores)
}"""


def _model(text: str) -> ir.Model:
    model = with_shapes(text)
    (groups,) = (value for node in model.graph for value in node.outputs if value.name == "groups")
    groups.shape = ir.Shape(["T", 2])
    return model


def test_the_choice_is_dropped_with_the_same_result() -> None:
    before, after = _model(ROUTER), _model(ROUTER)
    assert DropGroupChoicePass()(after).modified
    assert len(after.graph) <= 1, [node.op_type for node in after.graph]
    scores = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    (expected,), (found,) = run_model(before, {"scores": scores}), run_model(after, {"scores": scores})
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [("all = {2}", "all = {1}"), ("float[1] {1.0}", "float[1] {0.0}")],
    ids=["one group of two", "marked by zeros"],
)
def test_a_choice_that_leaves_some_out_stays(old: str, new: str) -> None:
    assert not DropGroupChoicePass()(_model(ROUTER.replace(old, new))).modified


def test_an_unknown_number_of_groups_stays() -> None:
    model = _model(ROUTER)
    (groups,) = (value for node in model.graph for value in node.outputs if value.name == "groups")
    groups.shape = ir.Shape(["T", "G"])
    assert not DropGroupChoicePass()(model).modified


def test_a_second_run_changes_nothing() -> None:
    model = _model(ROUTER)
    DropGroupChoicePass()(model)
    assert not DropGroupChoicePass()(model).modified
