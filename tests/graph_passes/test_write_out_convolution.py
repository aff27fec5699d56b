"""One operator with a state becomes a convolution of the state and the new tokens, with the same results."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.write_out_convolution import WriteOutConvolutionPass
from tests.graph_passes.running import run_model

BEFORE = """<ir_version: 10, opset_import: ["" : 27]>
layer (float[B,6,S] x, float[6,1,4] w, float[6] b, float[B,6,3] conv) => (float[B,6,S] y, float[B,6,3] present_conv)
{
    y, present_conv = CausalConvWithState <activation = "silu"> (x, w, b, conv)
}
"""


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("text", [BEFORE, BEFORE.replace("w, b,", "w, ,"), BEFORE.replace("silu", "none")])
def test_it_is_written_out_in_a_graph_of_opset_24_with_the_same_result(text: str, tokens: int) -> None:
    rng = np.random.default_rng(0)
    shapes = {"x": (3, 6, tokens), "w": (6, 1, 4), "b": (6,), "conv": (3, 6, 3)}
    feeds = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    model = ir.from_onnx_text(text)
    before = run_model(model, feeds)
    assert WriteOutConvolutionPass()(model).modified
    assert model.graph.opset_imports == {"": 24}
    assert "CausalConvWithState" not in [node.op_type for node in model.graph]
    for expected, found in zip(before, run_model(model, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not WriteOutConvolutionPass()(model).modified
