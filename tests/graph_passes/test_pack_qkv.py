"""Three projections become one, and the attention gives the same result."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.pack_qkv import PackQKVPass
from tests.graph_passes.running import attention_feeds, run_model

# 2 query heads and 1 key/value head of 16
HEAD = """<ir_version: 10, opset_import: ["" : 24, "com.microsoft" : 1]>
layer (float[B,S,32] x, float[B,1,C,16] past_key, float[B,1,C,16] past_value, int32[B] seqlens_k, int32[1] total,
       float[32,32] wq, float[16,32] wk, float[16,32] wv, float[32] bq, float[16] bk, float[16] bv)
    => (float[B,S,32] y, float[B,1,C,16] present_key, float[B,1,C,16] present_value)
<float eighth = {0.125}>
{
    tq = Transpose <perm = [1, 0]> (wq)
    tk = Transpose <perm = [1, 0]> (wk)
    tv = Transpose <perm = [1, 0]> (wv)
    BODY
    y, present_key, present_value = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1, scale = 0.5>
        (q, k, v, past_key, past_value, seqlens_k, total)
}
"""
PLAIN = "q = MatMul (x, tq)\n k = MatMul (x, tk)\n v = MatMul (x, tv)"
BIASED = """mq = MatMul (x, tq)
 aq = Add (mq, bq)
 q = Mul (aq, eighth)
 mk = MatMul (x, tk)
 k = Add (mk, bk)
 mv = MatMul (x, tv)
 v = Add (bv, mv)"""
OTHER_ROWS = "z = Add (x, x)\n q = MatMul (x, tq)\n k = MatMul (z, tk)\n v = MatMul (x, tv)"
ONE_BIAS = "mq = MatMul (x, tq)\n q = Add (mq, bq)\n k = MatMul (x, tk)\n v = MatMul (x, tv)"
SCALED_KEY = PLAIN.replace("k = MatMul (x, tk)", "mk = MatMul (x, tk)\n k = Mul (mk, eighth)")
_BIASED_QUERY = "mq = MatMul (x, tq)\n q = Add (mq, bq)\n mk = MatMul (x, tk)\n"
READ_TWICE = f"{_BIASED_QUERY} k = Add (mk, bk)\n v = Add (mk, bv)"
ONE_NUMBER = f"{_BIASED_QUERY} k = Add (mk, eighth)\n mv = MatMul (x, tv)\n v = Add (mv, bv)"
NORMED = "q = MatMul (x, tq)\n mk = MatMul (x, tk)\n k = Relu (mk)\n v = MatMul (x, tv)"


def _model(body: str) -> ir.Model:
    """The graph with weights as parameters of dotted names, which text cannot hold."""
    model = ir.from_onnx_text(HEAD.replace("BODY", body))
    rng = np.random.default_rng(0)
    for value in list(model.graph.inputs)[5:]:
        shape = [size for size in value.shape or () if isinstance(size, int)]
        model.graph.inputs.remove(value)
        value.name = f"layer.{value.name}"
        value.const_value = ir.tensor(rng.standard_normal(shape).astype(np.float32), name=value.name)
        model.graph.register_initializer(value)
    return model


@pytest.mark.parametrize(("body", "operators"), [(PLAIN, ["Transpose", "MatMul"]), (BIASED, ["Transpose", "MatMul", "Add"])])
def test_one_product_feeds_the_attention_with_the_same_result(body: str, operators: list[str]) -> None:
    model = _model(body)
    before = run_model(model, attention_feeds(1))
    assert PackQKVPass()(model).modified
    assert [node.op_type for node in model.graph] == [*operators, "GroupQueryAttention"]
    assert [value is None for value in model.graph[-1].inputs[:3]] == [False, True, True]
    for expected, found in zip(before, run_model(model, attention_feeds(1)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not PackQKVPass()(model).modified


def test_a_factor_on_the_query_becomes_the_attentions_scale() -> None:
    model = _model(BIASED)
    PackQKVPass()(model)
    assert model.graph[-1].attributes["scale"].as_float() == 0.5 * 0.125


@pytest.mark.parametrize(
    "body",
    [OTHER_ROWS, ONE_BIAS, SCALED_KEY, NORMED, READ_TWICE, ONE_NUMBER],
    ids=["other rows", "one bias", "a scaled key", "something between", "a product read twice", "one number added"],
)
def test_it_declines_where_the_three_are_not_alike(body: str) -> None:
    model = _model(body)
    count = len(model.graph)
    assert not PackQKVPass()(model).modified
    assert len(model.graph) == count
