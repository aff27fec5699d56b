"""Two products of the same rows before, one and a split after."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.pack_gate_up import PackGateUpPass
from tests.graph_passes.running import run_model

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
mlp (float[B,S,8] x, float[12,8] gate, float[12,8] up, float[10,8] odd) => (float[B,S,12] y)
{
    tg = Transpose <perm = [1, 0]> (gate)
    tu = Transpose <perm = [1, 0]> (up)
    g = MatMul (x, tg)
    u = MatMul (x, tu)
    s = Sigmoid (g)
    a = Mul (g, s)
    y = Mul (a, u)
}
"""
OTHER_ROWS = BEFORE.replace("MatMul (x, tu)", "MatMul (z, tu)").replace("    g = MatMul", "    z = Add (x, x)\n    g = MatMul")
THREE = BEFORE.replace("    s = Sigmoid (g)", "    w = MatMul (x, tg)\n    s = Sigmoid (w)")
ODD = BEFORE.replace("(gate)", "(odd)").replace("y = Mul (a, u)", "p = ReduceSum (a)\n    y = Mul (p, u)")


def _model(text: str) -> ir.Model:
    model = ir.from_onnx_text(text)
    rng = np.random.default_rng(0)
    for value in list(model.graph.inputs)[1:]:
        model.graph.inputs.remove(value)
        shape = [size for size in value.shape or () if isinstance(size, int)]
        value.name = f"mlp.{value.name}"
        value.const_value = ir.tensor(rng.standard_normal(shape).astype(np.float32), name=value.name)
        model.graph.register_initializer(value)
    return model


X = {"x": np.random.default_rng(1).standard_normal((2, 3, 8)).astype(np.float32)}


def test_one_product_is_split_into_gate_and_up() -> None:
    model = _model(BEFORE)
    (before,) = run_model(model, X)
    assert PackGateUpPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Transpose", "MatMul", "Split", "Sigmoid", "Mul", "Mul"]
    np.testing.assert_allclose(run_model(model, X)[0], before, rtol=1e-5, atol=1e-6)
    assert not PackGateUpPass()(model).modified


@pytest.mark.parametrize("text", [OTHER_ROWS, THREE, ODD], ids=["other rows", "three products", "other widths"])
def test_it_declines_anything_but_two_alike(text: str) -> None:
    model = _model(text)
    assert not PackGateUpPass()(model).modified
    assert "Split" not in [node.op_type for node in model.graph]
