"""A norm for each head becomes one norm for all heads and a product."""

from __future__ import annotations

import numpy as np
import pytest

from skipdecode.graph_passes.fuse_head_norms import FuseHeadNormsPass
from tests.graph_passes.running import run_model, with_shapes

NORMS = """<ir_version: 10, opset_import: ["" : 24]>
g (float[B,2,S,4] x) => (float[B,2,S,4] y)
<float[4] w0 = {1, 2, 3, 4}, float[4] w1 = {5, 6, 7, 8}, float[4] bias = {1, 1, 1, 1}>
{
    a, b = Split <axis = 1, num_outputs = 2> (x)
    c = LayerNormalization <axis = -1, epsilon = 0.001> (a, w0)  d = LayerNormalization <axis = -1, epsilon = 0.001> (b, w1)
    y = Concat <axis = 1> (c, d)
}"""


@pytest.mark.parametrize("norm", ["LayerNormalization", "RMSNormalization"])
def test_norms_of_all_heads_become_one_with_the_same_result(norm: str) -> None:
    text = NORMS.replace("LayerNormalization", norm)
    before, after = with_shapes(text), with_shapes(text)
    assert FuseHeadNormsPass()(after).modified
    kinds = [node.op_type for node in after.graph if node.op_type != "Constant"]
    assert kinds == [norm, "Concat", "Reshape", "Transpose", "Mul"]
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 2, 3, 4)).astype(np.float32)}
    (expected,), (found,) = run_model(before, feeds), run_model(after, feeds)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(c, d)", "(d, c)"),
        ("(c, d)", "(c, c)"),
        ("epsilon = 0.001> (b", "epsilon = 0.01> (b"),
        ("(b, w1)", "(b, w1, bias)"),
        ("d = LayerNormalization", "d = RMSNormalization"),
        ("Split <axis = 1, num", "Split <axis = 2, num"),
        ("Concat <axis = 1>", "Concat <axis = 2>"),
        ("[B,2,S,4] x", "[B,4,S,4] x"),
        ("axis = -1, epsilon", "axis = 2, epsilon"),
    ],
)
def test_it_declines_where_the_result_would_differ(old: str, new: str) -> None:
    text = NORMS.replace(old, new).replace("float[B,2,S,4] y", "float[B,K,L,M] y")
    assert text != NORMS and not FuseHeadNormsPass()(with_shapes(text)).modified


def test_a_second_run_changes_nothing() -> None:
    model = with_shapes(NORMS)
    FuseHeadNormsPass()(model)
    assert not FuseHeadNormsPass()(model).modified
