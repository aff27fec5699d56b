"""A shape computed at run time becomes a constant."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.freeze_reshapes import FreezeReshapesPass
from tests.graph_passes.running import run_model, with_shapes

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
heads (float[B,S,64] x) => (OUTPUT y)
<int64[2] rest = {4, 16}, int64[1] width = {64}, int64[1] one = {1}>
{
    rows = Shape <start = 0, end = 1> (x)
    tokens = Shape <start = 1, end = 2> (x)
    shape = Concat <axis = 0> (PARTS)
    y = Reshape <allowzero = 1> (x, shape)
}
"""


def _before(parts: str, output: str) -> ir.Model:
    return ir.from_onnx_text(BEFORE.replace("PARTS", parts).replace("OUTPUT", output))


@pytest.mark.parametrize(
    ("parts", "output", "sizes"),
    [
        ("rows, tokens, rest", "float[B,S,4,16]", [0, 0, 4, 16]),
        ("one, tokens, rows, width", "float[1,S,B,64]", [1, 0, -1, 64]),
        ("rows, tokens, one, width", "float[B,S,1,64]", [0, 0, 1, 64]),
        ("one, rows, tokens, width", "float[1,B,S,64]", None),
    ],
)
def test_dimensions_are_copied_or_inferred_where_that_is_equivalent(parts: str, output: str, sizes: list[int] | None) -> None:
    model = _before(parts, output)
    x = np.arange(2 * 3 * 64, dtype=np.float32).reshape(2, 3, 64)
    (before,) = run_model(model, {"x": x})
    assert FreezeReshapesPass()(model).modified == (sizes is not None)
    if sizes is not None:
        constant, reshape = model.graph
        assert constant.attributes["value"].as_tensor().numpy().tolist() == sizes
        assert reshape.op_type == "Reshape"
    np.testing.assert_array_equal(run_model(model, {"x": x})[0], before)


def test_two_sizes_known_only_from_an_input_are_read_from_it() -> None:
    text = """<ir_version: 10, opset_import: ["" : 24]>
    back (float[B,S,64] x, float[N,64] flat) => (float[B,S,64] y)
    <int64[1] width = {64}>
    {
        rows = Shape <start = 0, end = 1> (x)
        tokens = Shape <start = 1, end = 2> (x)
        shape = Concat <axis = 0> (rows, tokens, width)
        y = Reshape <allowzero = 1> (flat, shape)
    }"""
    before, after = ir.from_onnx_text(text), ir.from_onnx_text(text)
    assert FreezeReshapesPass()(after).modified
    assert [node.op_type for node in after.graph] == ["Shape", "Reshape"]
    feeds = {"x": np.zeros((2, 3, 64), np.float32), "flat": np.arange(6 * 64, dtype=np.float32).reshape(6, 64)}
    np.testing.assert_array_equal(run_model(after, feeds)[0], run_model(before, feeds)[0])
    assert not FreezeReshapesPass()(after).modified


@pytest.mark.parametrize("target", ["shape", "left"], ids=["worked out", "constant"])
def test_a_reshape_to_the_same_shape_is_dropped(target: str) -> None:
    text = """<ir_version: 10, opset_import: ["" : 24]>
    same (float[B,S,64] x) => (float[B,S,64] y)
    <int64[1] width = {64}, int64[3] left = {0, -1, 64}>
    {
        rows = Shape <start = 0, end = 1> (x)
        tokens = Shape <start = 1, end = 2> (x)
        shape = Concat <axis = 0> (rows, tokens, width)
        wide = Add (x, x)
        y = Reshape (wide, TARGET)
    }"""
    model = with_shapes(text.replace("TARGET", target))
    assert FreezeReshapesPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Add"]
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert not FreezeReshapesPass()(model).modified
