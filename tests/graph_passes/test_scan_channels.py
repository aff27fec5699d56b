"""Mamba's recurrence, traced as linear attention with values of size 1, becomes one Scan."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.scan_channels import ScanChannelsPass
from tests.graph_passes.running import Array, run_model

BEFORE = """<ir_version: 10, opset_import: ["" : 27]>
layer (float[B,S,4] c, float[B,S,4] b, float[B,S,6] u, float[B,4,6] past_state, float[B,S,6] dt, float[6,4] rates)
    => (float[B,S,6] y, float[B,4,6] present_state)
<int64[1] heads = {2}, int64[1] last = {-1}, int64[4] sizes = {1, 1, 6, 1}, int64[4] others = {1, 1, 6, 1},
 int64[3] flat = {0, 0, 24}>
{
    c_each = Unsqueeze (c, heads)
    c_wide = Expand (c_each, sizes)
    query = Reshape (c_wide, flat)
    b_each = Unsqueeze (b, heads)
    b_wide = Expand (b_each, others)
    key = Reshape (b_wide, flat)
    dt_each = Unsqueeze (dt, last)
    logs = Mul (dt_each, rates)
    decays = Reshape (logs, flat)
    turned = Transpose <perm = [0, 2, 1]> (past_state)
    past = Unsqueeze (turned, last)
    val_2, present = LinearAttention <q_num_heads = 6, kv_num_heads = 6, update_rule = "gated", scale = 1.0>
        (query, key, u, past, decays)
    squeezed = Squeeze (present, last)
    present_state = Transpose <perm = [0, 2, 1]> (squeezed)
    y = Relu (val_2)
}
"""


def _feeds(rows: int, tokens: int) -> dict[str, Array]:
    rng = np.random.default_rng(tokens)
    shapes = {"c": (4,), "b": (4,), "u": (6,), "dt": (6,)}
    feeds = {name: rng.standard_normal((rows, tokens, *shape)).astype(np.float32) for name, shape in shapes.items()}
    feeds["past_state"] = rng.standard_normal((rows, 4, 6)).astype(np.float32)
    feeds["dt"], feeds["rates"] = np.abs(feeds["dt"]), -np.exp(rng.standard_normal((6, 4)).astype(np.float32))
    return feeds


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 1), (1, 9), (2, 40)])
def test_a_scan_over_all_channels_gives_the_same_result_as_a_head_per_channel(rows: int, tokens: int) -> None:
    model, feeds = ir.from_onnx_text(BEFORE), _feeds(rows, tokens)
    before = run_model(model, feeds)
    assert ScanChannelsPass()(model).modified
    assert {node.op_type for node in model.graph} == {"Transpose", "Scan", "Relu"}  # rates [6,4] are transposed
    for expected, found in zip(before, run_model(model, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert not ScanChannelsPass()(model).modified


@pytest.mark.parametrize(
    ("was", "other"),
    [("scale = 1.0", "scale = 0.5"), ("Reshape (logs, flat)", "Relu (dt)"), ("(dt_each, rates)", "(dt_each, dt_each)")],
    ids=["of another scale", "with a decay a head", "with rates of each token"],
)
def test_other_linear_attention_stays(was: str, other: str) -> None:
    assert not ScanChannelsPass()(ir.from_onnx_text(BEFORE.replace(was, other))).modified
