"""Shared experts of width 0 are dropped, and the other experts stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.drop_empty_products import DropEmptyProductsPass
from tests.graph_passes.running import run_model, with_shapes

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
mixture (float[B,S,4] x, float[B,S,4] experts, float[INNER,4] up, float[4,INNER] down, float[4] bias) => (float[B,S,4] y)
<int64[3] sizes = {0, 0, 4}>
{
    wide = Transpose <perm = [1, 0]> (up)
    inner = MatMul (x, wide)
    active = Relu (inner)
    narrow = Transpose <perm = [1, 0]> (down)
    shared = MatMul (active, narrow)
    again = Reshape (shared, sizes)
    routed = Add (experts, x)
    y = Add (SUM)
}
"""
FEEDS = {
    name: np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for name, shape in {"x": (2, 3, 4), "experts": (2, 3, 4), "up": (0, 4), "down": (4, 0), "bias": (4,)}.items()
}


def _model(summands: str, inner: int = 0) -> ir.Model:
    return with_shapes(BEFORE.replace("SUM", summands).replace("INNER", str(inner)))


@pytest.mark.parametrize("summands", ["shared, routed", "routed, again"])
def test_an_empty_product_is_dropped_from_its_sum(summands: str) -> None:
    model = _model(summands)
    assert DropEmptyProductsPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Add"]
    np.testing.assert_array_equal(run_model(model, FEEDS)[0], FEEDS["experts"] + FEEDS["x"])
    assert not DropEmptyProductsPass()(model).modified


@pytest.mark.parametrize(("summands", "inner"), [("routed, shared", 8), ("again, bias", 0)], ids=["of some width", "a bias"])
def test_a_product_of_some_width_and_a_sum_of_another_shape_stay(summands: str, inner: int) -> None:
    assert not DropEmptyProductsPass()(_model(summands, inner)).modified
