"""The maximum of a row comes from TopK instead of a reduction."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.replace_maximum import ReplaceMaximumPass
from tests.graph_passes.running import run_model

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
g (float[T,4,3] x) => (KIND[T,4,N] y)
<int64[1] axes = {2}>
{ y = REDUCE (x) }"""
LARGEST = "ReduceMax <keepdims = {}> (x, axes)"
WHERE = "ArgMax <axis = -1, keepdims = {}> (x)"
X = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("reduce", [LARGEST, WHERE])
def test_the_maximum_and_its_index_come_from_topk(reduce: str, keepdims: int) -> None:
    text = BEFORE.replace("REDUCE (x)", reduce.format(keepdims)).replace("KIND", "float" if reduce is LARGEST else "int64")
    text = text if keepdims else text.replace("[T,4,N]", "[T,4]")
    before, after = ir.from_onnx_text(text), ir.from_onnx_text(text)
    assert ReplaceMaximumPass()(after).modified
    assert [node.op_type for node in after.graph if node.op_type != "Constant"] == ["TopK", "Squeeze"][: 2 - keepdims]
    (expected,), (found,) = run_model(before, {"x": X}), run_model(after, {"x": X})
    np.testing.assert_array_equal(found, expected)
    assert not ReplaceMaximumPass()(after).modified


def test_a_maximum_over_columns_stays() -> None:
    text = BEFORE.replace("REDUCE (x)", LARGEST.format(1)).replace("KIND", "float").replace("axes = {2}", "axes = {1}")
    assert not ReplaceMaximumPass()(ir.from_onnx_text(text)).modified
