"""A softmax whose result becomes fp32 is computed in fp32."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from skipdecode.graph_passes.widen_softmax import WidenSoftmaxPass
from tests.graph_passes.running import replaced

ROUTER = """<ir_version: 10, opset_import: ["" : 24]>
g (float16[T,4] logits) => (float[T,2] weights, int64[T,2] chosen) {
    shares = Softmax <axis = -1> (logits)
    wide = Cast <to = 1> (shares)
    two = Constant <value_ints = [2]> ()
    weights, chosen = TopK (wide, two)
}"""


def test_shares_are_those_of_a_softmax_in_fp32() -> None:
    model = ir.from_onnx_text(ROUTER)
    assert WidenSoftmaxPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Cast", "Softmax", "Constant", "TopK"]
    logits = np.array([[0.1, 0.1001, -3.0, 0.1002], [9.0, 1.0, 9.0078, 2.0]], np.float16)
    weights, _ = ReferenceEvaluator(ir.to_proto(model)).run(None, {"logits": logits})  # rounds after each operator
    shares = np.exp(logits.astype(np.float64))
    wanted = -np.sort(-shares / shares.sum(axis=1, keepdims=True), axis=1)[:, :2]
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, wanted, rtol=1e-6)


def test_a_result_that_is_a_graph_output_becomes_the_softmaxs_own() -> None:
    text = """<ir_version: 10, opset_import: ["" : 24]>
    g (bfloat16[T,4] logits) => (float[T,4] wide) { shares = Softmax <axis = -1> (logits)  wide = Cast <to = 1> (shares) }"""
    model = ir.from_onnx_text(text)
    assert WidenSoftmaxPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Cast", "Softmax"]
    assert [(value.name, value.dtype) for value in model.graph.outputs] == [("wide", ir.DataType.FLOAT)]


@pytest.mark.parametrize(
    "changes",
    [
        {"float16[T,4] logits": "float[T,4] logits"},
        {"Cast <to = 1>": "Cast <to = 11>", "float[T,2]": "double[T,2]"},
        {"int64[T,2] chosen)": "int64[T,2] chosen, float16[T,4] shares)"},
        {"int64[T,2] chosen)": "int64[T,2] chosen, float16[T,4] narrow)", "two =": "narrow = Exp (shares)  two ="},
    ],
    ids=["fp32", "cast to double", "a graph output", "read by another node"],
)
def test_it_leaves_others_alone(changes: dict[str, str]) -> None:
    assert not WidenSoftmaxPass()(ir.from_onnx_text(replaced(ROUTER, *changes.items()))).modified
