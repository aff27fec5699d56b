"""Operators on flat rows [B*S,H] run on rows [B,S,H] instead."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.unflatten_rows import UnflattenRowsPass
from tests.graph_passes.running import run_model, with_parameters, with_shapes

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
mlp (float[B,S,4] x) => (float[B,S,4] y)
<float[3,4] up = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[3] bias = {1, -90, 2},
 float[3,4] down = {1, 0, 0, 2, 0, 1, 3, 0, 1, 1, 0, 0},
 float[4] scale = {1, 2, 1, 2}, int64[2] flat = {-1, 4}, int64[1] width = {4}>
{
    rows = Shape <start = 0, end = 1> (x)
    tokens = Shape <start = 1, end = 2> (x)
    shape = Concat <axis = 0> (rows, tokens, width)
    f = Reshape (x, flat)
    n = LayerNormalization <axis = 1> (f, scale)
    u = Gemm <transB = 1ALPHA> (n, up, bias)
    r = Relu (u)
    d = Gemm (r, down)
    EXTRA
    s = Add (f, d)
    y = Reshape (s, shape)
}
"""


def _before(alpha: str = "", extra: str = "") -> ir.Model:
    model = with_shapes(BEFORE.replace("ALPHA", alpha).replace("EXTRA", extra))
    flat = ir.Shape(["B*S", 4])  # as torch.export names it
    for node in model.graph:
        value = node.outputs[0]
        if value.shape is not None and len(value.shape) == 2:
            value.shape = ir.Shape([flat[0], value.shape[1]])
    return model


X = np.random.default_rng(0).standard_normal((2, 3, 4), dtype=np.float32)


def test_the_operators_run_on_unflattened_rows_and_both_reshapes_are_dropped() -> None:
    model = _before()
    (before,) = run_model(model, {"x": X})
    assert UnflattenRowsPass()(model).modified
    types = [node.op_type for node in model.graph]
    assert types == ["LayerNormalization", "Transpose", "MatMul", "Add", "Relu", "MatMul", "Add"]
    np.testing.assert_allclose(run_model(model, {"x": X})[0], before, rtol=1e-5, atol=1e-5)
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert not UnflattenRowsPass()(model).modified


@pytest.mark.parametrize(
    "changes",
    [{"alpha": ", alpha = 2.0"}, {"extra": "e = CumSum (d, width0)\n d2 = Add (d, e)"}],
    ids=["a scaled product", "rows that depend on each other"],
)
def test_it_declines_where_the_result_would_differ(changes: dict[str, str]) -> None:
    text = BEFORE
    if "extra" in changes:
        text = text.replace("Add (f, d)", "Add (f, d2)").replace("int64[1] width", "int64 width0 = {0}, int64[1] width")
    model = with_shapes(text.replace("ALPHA", changes.get("alpha", "")).replace("EXTRA", changes.get("extra", "")))
    (before,) = run_model(model, {"x": X})
    count = len(model.graph)
    assert not UnflattenRowsPass()(model).modified
    assert len(model.graph) == count, "unused copies are removed"
    np.testing.assert_array_equal(run_model(model, {"x": X})[0], before)


HEADS = """<ir_version: 10, opset_import: ["" : 24]>
gated (float[B,S,2,4] x, float[B,S,8] gate, float16[4] narrow) => (float[B,S,8] y)
<int64[2] flat = {-1, 4}, int64[1] width = {8}>
{
    rows = Shape <start = 0, end = 1> (x)
    tokens = Shape <start = 1, end = 2> (x)
    shape = Concat <axis = 0> (rows, tokens, width)
    f = Reshape (x, flat)
    h = Reshape (gate, flat)
    scale = Cast <to = 1> (narrow)
    n = RMSNormalization <axis = 1> (f, scale)
    m = Mul (n, h)
    y = Reshape (m, shape)
}
"""


def test_heads_with_a_norm_of_their_own_stay_unflattened_too() -> None:
    scale = np.array([1, 2, 1, 2], dtype=np.float16)
    model, kept = (with_parameters(HEADS, {"narrow": scale}) for _ in range(2))
    for each in (model, kept):
        ir.passes.common.ShapeInferencePass()(each)
        for node in each.graph:
            shape = node.outputs[0].shape
            if shape is not None and len(shape) == 2:
                node.outputs[0].shape = ir.Shape(["2*B*S", 4])
    feeds = {"x": X.reshape(1, 3, 2, 4), "gate": X.reshape(1, 3, 8) + 1}
    assert UnflattenRowsPass()(model).modified
    kinds = [node.op_type for node in model.graph if node.op_type != "Constant"]
    assert kinds.count("Reshape") == 2, "the gate into heads, and heads back into rows"
    assert all(len(node.outputs[0].shape or ()) != 2 for node in model.graph)
    np.testing.assert_allclose(run_model(model, feeds)[0], run_model(kept, feeds)[0], rtol=1e-6)
