"""Products of the same rows become one product, with the same results."""

from __future__ import annotations

import numpy as np

from skipdecode.graph_passes.pack_products import PackProductsPass
from tests.graph_passes.running import run_model, with_parameters

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
layer (float[B,S,16] x, float[8,16] q, float[4,16] k, float[16,16] o, float[16,6] turned, float[4] bias)
    => (float[B,S,8] a, float[B,S,4] b, float[B,S,16] c, float[B,S,6] d)
{
    q_t = Transpose <perm = [1, 0]> (q)
    a = MatMul (x, q_t)
    k_t = Transpose <perm = [1, 0]> (k)
    product = MatMul (x, k_t)
    b = Add (product, bias)
    o_t = Transpose <perm = [1, 0]> (o)
    rows = Tanh (x)
    c = MatMul (rows, o_t)
    d = MatMul (x, turned)
}
"""
SHAPES = {"q": (8, 16), "k": (4, 16), "o": (16, 16), "turned": (16, 6), "bias": (4,)}


def test_products_of_the_same_rows_with_weights_stored_alike_become_one() -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}
    model, feeds = with_parameters(BEFORE, arrays), {"x": rng.standard_normal((2, 3, 16), dtype=np.float32)}
    before = run_model(model, feeds)
    assert PackProductsPass()(model).modified
    products = [node for node in model.graph if node.op_type == "MatMul"]
    assert len(products) == 3, "q and k packed; o, of other rows; the one whose weight is stored transposed"
    assert [list(v.shape) for v in model.graph.initializers.values() if "packed" in v.name] == [[12, 16]]
    for expected, found in zip(before, run_model(model, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not PackProductsPass()(model).modified


def test_products_of_different_rows_are_left_alone() -> None:
    text = """<ir_version: 10, opset_import: ["" : 24]>
    layer (float[B,S,16] x, float[16,16] up, float[16,16] down) => (float[B,S,16] y)
    { inner = MatMul (x, up)  y = MatMul (inner, down) }"""
    model = with_parameters(text, {name: np.ones((16, 16), np.float32) for name in ("up", "down")})
    assert not PackProductsPass()(model).modified


def test_a_product_with_a_bias_of_its_own_is_left_alone() -> None:
    text = """<ir_version: 10, opset_import: ["" : 24]>
    layer (float[T,16] x, float[16,4] q, float[16,8] k, float[4] bias) => (float[T,4] a, float[T,8] b)
    { a = Gemm (x, q, bias)  b = MatMul (x, k) }"""
    shapes = {"q": (16, 4), "k": (16, 8), "bias": (4,)}
    model = with_parameters(text, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    assert not PackProductsPass()(model).modified


def test_a_router_is_not_packed_because_it_is_not_quantised() -> None:
    text = """<ir_version: 10, opset_import: ["" : 24]>
    layer (float[T,16] x, float[16,4] router, float[16,8] up) => (float[T,2] best, int64[T,2] chosen, float[T,8] y)
    <int64[1] two = {2}>
    { scores = MatMul (x, router)  best, chosen = TopK (scores, two)  y = MatMul (x, up) }"""
    model = with_parameters(text, {"router": np.ones((16, 4), np.float32), "up": np.ones((16, 8), np.float32)})
    assert not PackProductsPass()(model).modified
