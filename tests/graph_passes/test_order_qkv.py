"""Query, key and value from one matrix are put into the order that the attention reads."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.order_qkv import OrderQKVPass
from tests.graph_passes.running import attention_feeds, run_model, with_parameters

# 2 heads of 16
HEAD = """<ir_version: 10, opset_import: ["" : 24, "com.microsoft" : 1]>
layer (float[B,S,32] x, float[B,2,C,16] past_key, float[B,2,C,16] past_value, int32[B] seqlens_k, int32[1] total,
       float[96,32] w, float[96] b)
    => (float[B,S,32] y, float[B,2,C,16] present_key, float[B,2,C,16] present_value)
<int64[5] heads = {0, 0, 2, 3, 16}, int64[3] flat = {0, 0, 32}, int64[3] sizes = {32, 32, 32},
 float half = {0.5}, int64 zero = {0}, int64 one = {1}, int64 two = {2}>
{
    t = Transpose <perm = [1, 0]> (w)
    product = MatMul (x, t)
    rows = Add (product, b)
    BODY
    y, present_key, present_value = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2, scale = 0.25>
        (q, k, v, past_key, past_value, seqlens_k, total)
}
"""
A_HEAD_AT_A_TIME = """split = Reshape (rows, heads)
    q0 = Gather <axis = 3> (split, zero)  q = Reshape (q0, flat)
    k0 = Gather <axis = 3> (split, one)   k = Reshape (k0, flat)
    v0 = Gather <axis = 3> (split, two)   v = Reshape (v0, flat)"""
VALUES_FIRST = A_HEAD_AT_A_TIME.replace("(split, zero)", "(split, last)").replace("(split, two)", "(split, zero)")
VALUES_FIRST = VALUES_FIRST.replace("(split, last)", "(split, two)")
SIDE_BY_SIDE = "q, k, v = Split <axis = -1> (rows, sizes)"
A_PART_TWICE = A_HEAD_AT_A_TIME.replace("(split, two)", "(split, one)")
CHANGED = A_HEAD_AT_A_TIME.replace("k = Reshape (k0, flat)", "k1 = Relu (k0)  k = Reshape (k1, flat)")
# the same as the first body with one token and one row, but not with more
ROWS_MIXED = A_HEAD_AT_A_TIME.replace("Reshape (rows, heads)", "Reshape (mixed, heads)").replace(
    "split =", "mixed = Transpose <perm = [1, 0, 2]> (rows)  split =", 1
)
# the rows are scaled before they are split
SCALED = A_HEAD_AT_A_TIME.replace("Reshape (rows, heads)", "Reshape (scaled, heads)").replace(
    "split =", "scaled = Mul (rows, half)  split =", 1
)


def _model(body: str) -> ir.Model:
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((96, 32)), "b": rng.standard_normal(96)}
    model = with_parameters(HEAD.replace("BODY", body), {name: array.astype(np.float32) for name, array in arrays.items()})
    for node in model.graph:
        if node.op_type in ("Add", "Mul"):
            node.outputs[0].shape = ir.Shape(["B", "S", 96])
    return model


@pytest.mark.parametrize("body", [A_HEAD_AT_A_TIME, VALUES_FIRST, SIDE_BY_SIDE], ids=["heads", "values first", "side by side"])
def test_the_attention_reads_the_products_rows_directly_with_the_same_result(body: str) -> None:
    model = _model(body)
    before = run_model(model, attention_feeds(2))
    assert OrderQKVPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Transpose", "MatMul", "Add", "GroupQueryAttention"]
    assert [value is None for value in model.graph[-1].inputs[:3]] == [False, True, True]
    for expected, found in zip(before, run_model(model, attention_feeds(2)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not OrderQKVPass()(model).modified


def test_a_split_of_rows_in_order_is_dropped_wherever_they_come_from() -> None:
    """No parameter is touched, so every number stays the same."""
    model = ir.from_onnx_text(HEAD.replace("BODY", SIDE_BY_SIDE))
    next(node.outputs[0] for node in model.graph if node.op_type == "Add").shape = ir.Shape(["B", "S", 96])
    rng = np.random.default_rng(0)
    feeds = {**attention_feeds(2), "w": rng.standard_normal((96, 32), np.float32), "b": rng.standard_normal(96, np.float32)}
    before = run_model(model, feeds)
    assert OrderQKVPass()(model).modified
    assert "Split" not in [node.op_type for node in model.graph]
    for expected, found in zip(before, run_model(model, feeds), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "body", [A_PART_TWICE, CHANGED, ROWS_MIXED, SCALED], ids=["a part twice", "changed", "rows mixed", "scaled"]
)
def test_it_declines_where_the_three_are_not_exactly_the_products_rows(body: str) -> None:
    model = _model(body)
    count = len(model.graph)
    assert not OrderQKVPass()(model).modified
    assert len(model.graph) == count
