"""A Split into unequal parts becomes one Slice per part."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.slice_uneven_splits import SliceUnevenSplitsPass
from tests.graph_passes.running import run_model

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
g (float[B,8,S] x) => (float[B,4,S] a, float[B,2,S] b, float[B,2,S] c)
<int64[3] sizes = {4, 2, 2}>
{
    a, other, c = Split <axis = 1> (x, sizes)
    b = Relu (other)
}"""
X = np.random.default_rng(0).standard_normal((2, 8, 3)).astype(np.float32)


def test_unequal_parts_become_slices_with_the_same_results() -> None:
    before, after = ir.from_onnx_text(BEFORE), ir.from_onnx_text(BEFORE)
    assert SliceUnevenSplitsPass()(after).modified
    assert [node.op_type for node in after.graph if node.op_type != "Constant"] == ["Slice", "Slice", "Slice", "Relu"]
    assert [value.name for value in after.graph.outputs] == ["a", "b", "c"]
    for expected, found in zip(run_model(before, {"x": X}), run_model(after, {"x": X}), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert not SliceUnevenSplitsPass()(after).modified


@pytest.mark.parametrize(
    ("old", "new"),
    [("sizes = {4, 2, 2}", "sizes = {3, 3, 3}"), ("Split <axis = 1> (x, sizes)", "Split <axis = 1, num_outputs = 3> (x)")],
    ids=["sizes", "by number"],
)
def test_equal_parts_stay(old: str, new: str) -> None:
    assert BEFORE.count(old) == 1
    assert not SliceUnevenSplitsPass()(ir.from_onnx_text(BEFORE.replace(old, new))).modified
