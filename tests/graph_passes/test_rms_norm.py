"""A norm of two types before, of one after."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from skipdecode.graph_passes.uniform_norm import UniformNormPass
from tests.graph_passes.running import run_model

NORM = """<ir_version: 10, opset_import: ["" : 24]>
g (float16[B,8] x) => (float[B,8] y)
<float[8] scale = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}> { y = RMSNormalization (x, scale) }"""


def test_the_input_is_cast_to_the_scales_type() -> None:
    model = ir.from_onnx_text(NORM)
    assert UniformNormPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Cast", "RMSNormalization"]
    x = np.arange(16, dtype=np.float16).reshape(2, 8)
    (found,) = run_model(model, {"x": x})
    wide = x.astype(np.float32)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.arange(1, 9)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_it_leaves_norms_of_one_type_alone() -> None:
    model = ir.from_onnx_text(NORM.replace("float16", "float"))
    assert not UniformNormPass()(model).modified
