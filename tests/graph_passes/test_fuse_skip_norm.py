"""A residual sum and a norm become one operator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.fuse_skip_norm import FuseSkipNormPass
from tests.graph_passes.running import run_model

SCALE = "float[8] scale = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}, float[8] bias = {0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0}"
NORMS = {
    "SkipSimplifiedLayerNormalization": "RMSNormalization <epsilon = 0.01> (x, scale)",
    "SkipLayerNormalization": "LayerNormalization <epsilon = 0.01> (x, scale, bias)",
}


def _model(norm: str, second: str = "float[B,S,8]", most: str = "hidden = Add (x, y)") -> ir.Model:
    return ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 24]>
        g (float[B,S,8] a, {second} b) => (float[B,S,8] hidden) <{SCALE}> {{ x = Add (a, b)  y = {norm}  {most} }}"""
    )


def _shapes(model: ir.Model) -> ir.Model:
    for node in model.graph:
        for value in node.outputs:
            value.shape, value.type = model.graph.inputs[0].shape, model.graph.inputs[0].type
    return model


def _assert_same(before: ir.Model, after: ir.Model) -> None:
    rng = np.random.default_rng(0)
    feeds = {key: rng.standard_normal((2, 3, 8)).astype(np.float32) for key in "ab"}
    for found, expected in zip(run_model(after, feeds), run_model(before, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_a_residual_sum_and_its_norm_become_one_operator_whose_sum_is_still_read(name: str) -> None:
    before, after = (_shapes(_model(NORMS[name])) for _ in range(2))
    assert FuseSkipNormPass()(after).modified
    assert [node.op_type for node in after.graph] == [name, "Add"]
    _assert_same(before, after)


@pytest.mark.parametrize("sums", ["m = Add (a, beta)  x = Add (m, b)", "m = Add (beta, a)  x = Add (b, m)"])
@pytest.mark.parametrize("name", NORMS)
def test_a_projections_bias_is_fused_too(name: str, sums: str) -> None:
    before, after = (_shapes(_biased(NORMS[name], sums)) for _ in range(2))
    assert FuseSkipNormPass()(after).modified
    assert [node.op_type for node in after.graph] == [name, "Add"]
    _assert_same(before, after)


def test_a_biased_sum_that_others_read_stays() -> None:
    sums = "m = Add (a, beta)  x = Add (m, b)"
    before, after = (_shapes(_biased(NORMS["SkipLayerNormalization"], sums, "hidden = Add (m, y)")) for _ in range(2))
    assert FuseSkipNormPass()(after).modified
    assert [node.op_type for node in after.graph] == ["Add", "SkipLayerNormalization", "Add"]
    assert {value.name for value in after.graph[1].inputs if value} == {"m", "b", "scale", "bias"}, "the bias is not added again"
    _assert_same(before, after)


def _biased(norm: str, sums: str, most: str = "hidden = Add (x, y)") -> ir.Model:
    beta = "float[8] beta = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8}"
    return ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 24]>
        g (float[B,S,8] a, float[B,S,8] b) => (float[B,S,8] hidden) <{SCALE}, {beta}> {{ {sums}  y = {norm}  {most} }}"""
    )


def test_the_sum_may_be_the_graphs_output() -> None:
    norm = NORMS["SkipLayerNormalization"].replace("(x,", "(hidden,")
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
    g (float[B,S,8] a, float[B,S,8] b) => (float[B,S,8] hidden, float[B,S,8] z)
    <{SCALE}> {{ hidden = Add (a, b)  y = {norm}  z = Add (y, y) }}"""
    before, after = (_shapes(ir.from_onnx_text(text)) for _ in range(2))
    assert FuseSkipNormPass()(after).modified
    _assert_same(before, after)


def test_it_declines_a_sum_that_broadcasts() -> None:
    assert not FuseSkipNormPass()(_shapes(_model(NORMS["SkipLayerNormalization"], second="float[8]"))).modified


@pytest.mark.parametrize(
    ("rows", "scale"), [("float[B,S,8]", "float[1,8]"), ("float[B,2,S,8]", "float[8]"), ("float[N,8]", "float[8]")]
)
def test_it_declines_a_scale_or_a_sum_of_other_dimensions(rows: str, scale: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
    g ({rows} a, {rows} b, {scale} scale) => ({rows} y) {{ x = Add (a, b)  z = RMSNormalization (x, scale)  y = Neg (z) }}"""
    assert not FuseSkipNormPass()(_shapes(ir.from_onnx_text(text))).modified


def test_a_norm_that_names_no_epsilon_has_onnxs() -> None:
    before, after = (_shapes(_model(NORMS["SkipLayerNormalization"].replace("<epsilon = 0.01> ", ""))) for _ in range(2))
    assert FuseSkipNormPass()(after).modified
    (fused, _) = after.graph
    assert fused.attributes["epsilon"].as_float() == pytest.approx(1e-5)
    _assert_same(before, after)


def test_it_declines_a_norm_over_several_axes() -> None:
    assert not FuseSkipNormPass()(_shapes(_model("LayerNormalization <axis = 1> (x, scale)"))).modified
