"""A part that is looked up by a constant index is sliced instead, with the same result."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.slice_gathers import SliceGathersPass
from tests.graph_passes.running import run_model

TEXT = """<ir_version: 10, opset_import: ["" : 24]>
g (float[B,S,24] x) => (float[B,S,4,2] y) <int64[5] sizes = {0, 0, 4, 3, 2}, int64 which = {WHICH}>
{ parts = Reshape (x, sizes)  y = Gather <axis = AXIS> (parts, which) }"""


@pytest.mark.parametrize("axis", ["3", "-2"])
@pytest.mark.parametrize("which", ["0", "2", "-1"])
def test_one_part_of_a_nodes_output_is_sliced(which: str, axis: str) -> None:
    model = ir.from_onnx_text(TEXT.replace("WHICH", which).replace("AXIS", axis))
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3, 24)).astype(np.float32)}
    (before,) = run_model(model, feeds)
    assert SliceGathersPass()(model).modified
    assert [node.op_type for node in model.graph if node.op_type != "Constant"] == ["Reshape", "Slice", "Squeeze"]
    np.testing.assert_array_equal(run_model(model, feeds)[0], before)
    assert not SliceGathersPass()(model).modified


@pytest.mark.parametrize(
    "text",
    [
        "g (float[B,3] x) => (float[B] y) <int64 i = {1}> { y = Gather <axis = 1> (x, i) }",
        "g (float[B,3] x, int64[S] i) => (float[B,S] y) { z = Neg (x)  y = Gather <axis = 1> (z, i) }",
        "g (float[B,3] x) => (float[B,1] y) <int64[1] i = {1}> { z = Neg (x)  y = Gather <axis = 1> (z, i) }",
    ],
    ids=["of an input", "by an input", "that keeps its axis"],
)
def test_look_ups_are_left_alone(text: str) -> None:
    assert not SliceGathersPass()(ir.from_onnx_text('<ir_version: 10, opset_import: ["" : 24]>' + text)).modified
