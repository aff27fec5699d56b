"""A scale per head becomes ones and a product, which CUDA's kernels can broadcast, with the same result."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.split_norm_scales import SplitNormScalesPass
from tests.graph_passes.running import run_model, with_shapes

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
norm (float[B,S,2,16] x, float[SCALE] scale, float[SCALE] bias) => (float[B,S,2,16] y)
{
    y = NORM
}
"""
RMS = "RMSNormalization <axis = -1, epsilon = 0.01> (x, scale)"
LAYER = "LayerNormalization <axis = -1, epsilon = 0.01> (x, scale"


def _before(norm: str, scale: str) -> ir.Model:
    return with_shapes(BEFORE.replace("SCALE", scale).replace("NORM", norm))


@pytest.mark.parametrize(
    ("norm", "kinds"),
    [
        (RMS, ["RMSNormalization", "Mul"]),
        (f"{LAYER})", ["LayerNormalization", "Mul"]),
        (f"{LAYER}, bias)", ["LayerNormalization", "Mul", "Add"]),
    ],
)
def test_weights_per_head_move_behind_the_norm(norm: str, kinds: list[str]) -> None:
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in
             (("x", (2, 3, 2, 16)), ("scale", (2, 16)), ("bias", (2, 16)))}  # fmt: skip
    model = _before(norm, "2,16")
    (before,) = run_model(model, feeds)
    assert SplitNormScalesPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Constant", *kinds]
    assert model.graph[0].attributes["value"].as_tensor().numpy().tolist() == [1.0] * 16
    (after,) = run_model(model, feeds)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)
    assert not SplitNormScalesPass()(model).modified


def test_one_scale_for_all_heads_is_left_alone() -> None:
    model = _before(f"{LAYER}, bias)", "16")
    assert not SplitNormScalesPass()(model).modified
    assert [node.op_type for node in model.graph] == ["LayerNormalization"]
