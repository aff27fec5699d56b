"""A norm or rotary embedding in fp32 between casts becomes one in the narrow type."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.narrow_operators import NarrowOperatorsPass
from tests.graph_passes.running import run_model, with_parameters, with_shapes

NORM = """<ir_version: 10, opset_import: ["" : 24]>
g (float16[B,8] x, float16[8] scale) => (float16[B,8] y)
{ wide_scale = Cast <to = 1> (scale)  rows = Cast <to = 1> (x)
  normed = RMSNormalization <epsilon = 0.001> (rows, wide_scale)  y = Cast <to = 10> (normed) }"""
LAYER_NORM = NORM.replace(
    "RMSNormalization <epsilon = 0.001> (rows, wide_scale)", "LayerNormalization (rows, wide_scale, wide_scale)"
)
ONE_MORE = NORM.replace("wide_scale = Cast <to = 1> (scale)", "w = Cast <to = 1> (scale)  wide_scale = Add (w, w)")
ROTARY = """<ir_version: 10, opset_import: ["" : 24]>
g (float16[B,2,S,8] h, float[B,S,4] cos, float[B,S,4] sin) => (float16[B,2,S,8] y)
{ wide = Cast <to = 1> (h)  turned = RotaryEmbedding <interleaved = 1, num_heads = 2> (wide, cos, sin)
  y = Cast <to = 10> (turned) }"""
_rng = np.random.default_rng(0)
SCALE, X = (_rng.standard_normal(shape).astype(np.float16) for shape in ((8,), (3, 8)))


def _model(text: str) -> ir.Model:
    return with_parameters(text, {"scale": SCALE})


@pytest.mark.parametrize("text", [NORM, LAYER_NORM], ids=["root mean square", "mean and variance"])
def test_a_norm_reads_and_writes_the_narrow_type_with_the_same_result(text: str) -> None:
    before, after = _model(text), _model(text)
    assert NarrowOperatorsPass()(after).modified
    (norm,) = after.graph
    assert {value.dtype for value in (*norm.inputs, *norm.outputs)} == {ir.DataType.FLOAT16}, (
        "the weight keeps the checkpoint's dtype"
    )
    (expected,), (found,) = run_model(before, {"x": X}), run_model(after, {"x": X})
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-3)


def test_a_rotary_embedding_reads_and_writes_the_narrow_type_with_rounded_tables() -> None:
    before, after = with_shapes(ROTARY), with_shapes(ROTARY)
    assert NarrowOperatorsPass()(after).modified
    assert [node.op_type for node in after.graph] == ["Cast", "Cast", "RotaryEmbedding"]
    feeds = {"h": _rng.standard_normal((2, 2, 3, 8)).astype(np.float16), "cos": _rng.random((2, 3, 4)).astype(np.float32)}
    feeds["sin"] = _rng.random((2, 3, 4)).astype(np.float32)
    (expected,), (found,) = run_model(before, feeds), run_model(after, feeds)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-3)


def test_positions_are_not_narrowed() -> None:
    text = ROTARY.replace("float[B,S,4] cos, float[B,S,4] sin)", "float[64,4] cos, float[64,4] sin, int64[B,S] at)")
    model = with_shapes(text.replace("(wide, cos, sin)", "(wide, cos, sin, at)"))
    assert NarrowOperatorsPass()(model).modified
    assert model.graph[-1].inputs[3] is model.graph.inputs[3]


def test_a_scale_that_is_computed_is_cast() -> None:
    before, after = _model(ONE_MORE), _model(ONE_MORE)
    assert NarrowOperatorsPass()(after).modified
    assert [node.op_type for node in after.graph] == ["Cast", "Add", "Cast", "RMSNormalization"]
    (expected,), (found,) = run_model(before, {"x": X}), run_model(after, {"x": X})
    np.testing.assert_allclose(found, expected, rtol=4e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(float16[B,8] y)", "(float16[B,8] y, float[B,8] normed)"),
        (
            "y = Cast <to = 10> (normed)",
            "z = Cast <to = 10> (normed)  more = Exp (normed)  w = Cast <to = 10> (more)  y = Add (z, w)",
        ),
        ("float16[B,8] x", "float[B,8] x"),
        ("<to = 10>", "<to = 16>"),
    ],
    ids=["an output", "read in fp32", "of fp32 rows", "cast to another type"],
)
def test_it_declines_where_fp32_is_still_read_or_the_types_differ(old: str, new: str) -> None:
    text = NORM.replace(old, new)
    text = text.replace("(float16[B,8] y)", "(bfloat16[B,8] y)") if "16>" in new else text
    assert not NarrowOperatorsPass()(_model(text)).modified


def test_a_second_run_changes_nothing() -> None:
    model = _model(NORM)
    NarrowOperatorsPass()(model)
    assert not NarrowOperatorsPass()(model).modified
