"""Narrow outputs become fp32 ones of the same name."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.widen_logits import WidenLogitsPass
from tests.graph_passes.running import run_model

HEAD = """<ir_version: 10, opset_import: ["" : 24]>
g (float16[B,2] hidden) => (float16[B,2] logits) { logits = Add (hidden, hidden) }"""


def test_logits_are_fp32_under_their_own_name() -> None:
    model = ir.from_onnx_text(HEAD)
    assert WidenLogitsPass()(model).modified
    assert [(value.name, value.dtype) for value in model.graph.outputs] == [("logits", ir.DataType.FLOAT)]
    (found,) = run_model(model, {"hidden": np.array([[1.5, -2.0]], dtype=np.float16)})
    assert found.dtype == np.float32 and found.tolist() == [[3.0, -4.0]]


@pytest.mark.parametrize("kind", ["float", "int64"])
def test_it_leaves_other_outputs_alone(kind: str) -> None:
    assert not WidenLogitsPass()(ir.from_onnx_text(HEAD.replace("float16", kind))).modified
