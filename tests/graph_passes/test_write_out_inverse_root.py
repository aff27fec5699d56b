"""The reciprocal of a root, traced as a power, becomes two operators."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from skipdecode.graph_passes.write_out_inverse_root import WriteOutInverseRootPass
from tests.graph_passes.running import run_model

POWER = """<ir_version: 10, opset_import: ["" : 24]>
g (float[3] x) => (float[3] y) <float exponent = {-0.5}> { y = Pow (x, exponent) }"""


def test_it_becomes_two_operators_with_the_same_result() -> None:
    before, after = ir.from_onnx_text(POWER), ir.from_onnx_text(POWER)
    assert WriteOutInverseRootPass()(after).modified
    assert [node.op_type for node in after.graph] == ["Sqrt", "Reciprocal"]
    feeds = {"x": np.array([0.25, 1e-6, 7.0], np.float32)}
    (expected,), (found,) = run_model(before, feeds), run_model(after, feeds)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_other_powers_are_left() -> None:
    for exponent in ("-1.0", "0.5", "2.0"):
        assert not WriteOutInverseRootPass()(ir.from_onnx_text(POWER.replace("-0.5", exponent))).modified


def test_a_second_run_changes_nothing() -> None:
    model = ir.from_onnx_text(POWER)
    WriteOutInverseRootPass()(model)
    assert not WriteOutInverseRootPass()(model).modified
