"""What the tracer leaves behind, and what the standard graph keeps of it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.clean_trace import clean_trace
from tests.graph_passes.running import with_parameters

RMS_NORM = """<ir_version: 10, opset_import: ["" : 24]>
g (float[B,S,8] x) => (float[B,S,8] y)
<float two = {2.0}, int64[1] last = {-1}, float epsilon = {0.00001}>
{
    square = Pow (x, two)
    mean = ReduceMean <keepdims = 1, noop_with_empty_axes = 0> (square, last)
    shifted = Add (mean, epsilon)
    root = Sqrt (shifted)
    inverse = Reciprocal (root)
    normal = Mul (x, inverse)
    y = Mul (weight, normal)
}
"""


def with_weight(text: str, name: str, data: np.ndarray) -> ir.Model:
    """The graph of `text`, whose value `weight` becomes the parameter `name` (text cannot hold a dotted name)."""
    kind = "float16" if data.dtype == np.float16 else "float"
    model = with_parameters(text.replace(" x) =>", f" x, {kind}{list(data.shape)} weight) =>"), {"weight": data})
    model.graph.initializers["layer.weight"].name = name
    return model


def test_a_decomposed_rms_norm_becomes_one_operator() -> None:
    model = with_weight(RMS_NORM, "layer.norm.weight", np.ones(8, np.float32))
    clean_trace(model)
    (node,) = model.graph
    assert node.op_type == "RMSNormalization"
    assert [value.name for value in node.inputs] == ["x", "layer.norm.weight"]


def test_a_tiny_epsilon_is_kept() -> None:
    """The rewriter's rule for x + 0 takes Helium's epsilon of 1e-8 for 0, and a row of zeros would be divided by 0."""
    model = with_weight(RMS_NORM.replace("0.00001", "0.00000001"), "layer.norm.weight", np.ones(8, np.float32))
    clean_trace(model)
    (node,) = model.graph
    assert node.attributes["epsilon"].as_float() == pytest.approx(1e-8)


def test_a_decomposed_layer_norm_becomes_one_operator() -> None:
    text = RMS_NORM.replace(
        "square = Pow (x", "middle = ReduceMean <keepdims = 1> (x, last)  away = Sub (x, middle)  square = Pow (away"
    )
    model = with_weight(text.replace("Mul (x,", "Mul (away,"), "layer.norm.weight", np.ones(8, np.float32))
    clean_trace(model)
    (node,) = model.graph
    assert node.op_type == "LayerNormalization"
    assert [value.name for value in node.inputs] == ["x", "layer.norm.weight"]


def test_even_small_parameters_are_never_folded() -> None:
    text = """<ir_version: 10, opset_import: ["" : 24]>
    g (float[B,S,8] x) => (float[B,S,8] y) { turned = Transpose <perm = [1, 0]> (weight)
        y = MatMul (x, turned) }"""
    model = with_weight(text, "layer.fc.weight", np.eye(8, dtype=np.float32))
    clean_trace(model)
    assert [node.op_type for node in model.graph] == ["Transpose", "MatMul"]
    assert "layer.fc.weight" in model.graph.initializers


def test_a_second_run_changes_nothing() -> None:
    model = with_weight(RMS_NORM, "layer.norm.weight", np.ones(8, np.float32))
    clean_trace(model)
    text = ir.to_onnx_text(model)
    clean_trace(model)
    assert ir.to_onnx_text(model) == text
