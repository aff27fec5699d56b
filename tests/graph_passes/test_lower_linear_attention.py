"""Standard linear attention becomes ONNX Runtime's own operators, with the same results."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from skipdecode.graph_passes.lower_linear_attention import LowerLinearAttentionPass
from tests.graph_passes.running import run_model

BEFORE = """<ir_version: 10, opset_import: ["" : 27]>
layer (float[B,6,S] x, float[6,1,4] w, float[B,6,3] conv, float[B,S,4] q, float[B,S,4] k, float[B,2,2,3] state, float[B,S,2] g,
       float[B,S,2] beta)
    => (float[B,S,6] y, float[B,6,3] present_conv, float[B,2,2,3] present_state)
{
    mixed, present_conv = CausalConvWithState <activation = "silu"> (x, w, , conv)
    v = Transpose <perm = [0, 2, 1]> (mixed)
    y, present_state = LinearAttention <q_num_heads = 2, kv_num_heads = 2, update_rule = "gated_delta", scale = 0.5>
        (q, k, v, state, g, beta)
}
"""


def test_both_operators_become_the_runtimes_own_in_a_graph_of_opset_24() -> None:
    rng = np.random.default_rng(0)
    model = ir.from_onnx_text(BEFORE)
    feeds = {
        str(value.name): rng.standard_normal([{"B": 3, "S": 5}.get(str(size), size) for size in value.shape]).astype(np.float32)
        for value in model.graph.inputs
        if value.shape is not None
    }
    feeds["g"] = -np.abs(feeds["g"])  # the logarithm of a decay
    before = run_model(model, feeds)
    assert LowerLinearAttentionPass()(model).modified
    assert model.graph.opset_imports == {"": 24, "com.microsoft": 1}
    assert [node.domain for node in model.graph] == ["com.microsoft", "", "com.microsoft"]
    for expected, found in zip(before, run_model(model, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not LowerLinearAttentionPass()(model).modified
