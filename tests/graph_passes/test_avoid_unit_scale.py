"""A scale of 1 becomes 1/4 on a query four times as large, with the same result."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.avoid_unit_scale import AvoidUnitScalePass
from tests.graph_passes.running import run_model, with_shapes

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
attend (float[B,2,S,16] query, float[B,2,C,16] key, float[B,2,C,16] value, bool[B,1,S,C] visible)
    => (float[B,2,S,16] attended)
{
    attended = Attention <scale = SCALE> (query, key, value, visible)
}
"""


def _before(scale: str) -> ir.Model:
    return with_shapes(BEFORE.replace("SCALE", scale))


def test_the_factor_moves_from_the_scale_to_the_query() -> None:
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 2, slots, 16), dtype=np.float32) for name, slots in
             (("query", 3), ("key", 5), ("value", 5))}  # fmt: skip
    feeds["visible"] = np.tril(np.ones((3, 5), dtype=bool), 2)[None, None].repeat(2, 0)
    model = _before("1.0")
    (before,) = run_model(model, feeds)
    assert AvoidUnitScalePass()(model).modified
    assert [node.op_type for node in model.graph] == ["Constant", "Mul", "Attention"]
    assert model.graph[-1].attributes["scale"].as_float() == 0.25
    (after,) = run_model(model, feeds)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
    assert not AvoidUnitScalePass()(model).modified


@pytest.mark.parametrize("scale", ["0.25", "0.9999"])
def test_other_scales_are_left_alone(scale: str) -> None:
    model = _before(scale)
    assert not AvoidUnitScalePass()(model).modified
    assert [node.op_type for node in model.graph] == ["Attention"]
