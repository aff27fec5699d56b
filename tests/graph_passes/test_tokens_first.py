"""Operations on heads transposed to the front are done with tokens first instead."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.tokens_first import TokensFirst
from tests.graph_passes.running import run_model, with_shapes

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
g (float[B,S,16] x, float[B,S,4] one, float[B,S,2] cos, float[B,S,2] sin, float[B,1,S,1] factor) => (float[B,2,S,N] y)
<int64[4] heads = {0, 0, 2, 8}, int64[4] single = {0, 1, -1, 4}, int64[2] sizes = {4, 4}, int64[1] three = {3},
 int64[1] zero = {0}, int64[1] four = {4}, int64[8] pads = {0, 0, 0, 0, 0, 0, 0, 3}, int64[4] mixed = {3, 1, 2, 0},
 float[8] scale = {1, 2, 3, 4, 5, 6, 7, 8}, int64[4] spread = {1, 2, 1, 1}, int64[4] each = {2, 2, 1, 1}>
{ split = Reshape (x, heads)  front = Transpose <perm = [0, 2, 1, 3]> (split)
  %s }"""
FORMS = {
    "norm": "y = RMSNormalization <epsilon = 0.001> (front, scale)",
    "norm with a bias": "y = LayerNormalization <axis = 3> (front, scale, scale)",
    "cast": "y32 = Cast <to = 11> (front)  y = Cast <to = 1> (y32)",
    "part": "y = Slice (front, zero, four, three)",
    "parts in another order": "a, b = Split <axis = 3> (front, sizes)  y = Concat <axis = -1> (b, a)",
    "numbers in another order": "a = Slice (front, zero, four, three)  y = Gather <axis = -1> (a, mixed)",
    "padded": "y = Pad (front, pads)",
    "rotated": "a = Slice (front, zero, four, three)  y = RotaryEmbedding <num_heads = 2, interleaved = 1> (a, cos, sin)",
    "a head for all": "a = Reshape (one, single)  b = Expand (a, spread)  y = Cast <to = 1> (b)",
    "beside a head for all": "a = Reshape (one, single)  b = Expand (a, spread)  y = Concat <axis = -1> (front, b)",
    "times a factor of the token's": "y = Mul (front, factor)",
    "times a number": "half = Constant <value_float = 0.5> ()  y = Mul (front, half)",
}


def _turned(text: str) -> ir.Model:
    """The graph with `y` as rows [B,S,N*D]."""
    model = with_shapes(BEFORE % text)
    (heads,) = model.graph.outputs
    end = ir.node("Identity", [heads])
    model.graph.append(end)
    model.graph.outputs[0] = TokensFirst(model.graph, end).rows(heads)
    ir.passes.common.RemoveUnusedNodesPass()(model)
    return model


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_operations_within_heads_need_no_transpose(text: str) -> None:
    model = _turned(text)
    assert "Transpose" not in [node.op_type for node in model.graph]
    _assert_same(text, model)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("y = Slice (front, zero, one_token, two)", 2),
        ("y = Softmax <axis = 2> (front)", 2),
        ("y = RMSNormalization <axis = 2> (front, scale)", 2),
        ("y = RMSNormalization (front, factor)", 2),
        ("row = Slice (a_head, zero, one_token, zero)  b = Expand (row, each)  y = Concat <axis = 3> (front, b)", 2),
        ("y = Concat <axis = 1> (a_head, a_head)", 1),
        ("y = RotaryEmbedding <interleaved = 0> (half, cos, sin)", 2),
    ],
)
def test_operations_across_tokens_or_heads_are_transposed_afterwards(text: str, count: int) -> None:
    before = "half = Slice (front, zero, four, three)  a_head = Reshape (one, single)"
    text = f"{before}  two = Constant <value_ints = [2]> ()  one_token = Constant <value_ints = [1]> ()  {text}"
    model = _turned(text)
    assert [node.op_type for node in model.graph].count("Transpose") == count
    _assert_same(text, model)


def test_the_same_heads_are_split_once() -> None:
    model = _turned("a, b = Split <axis = 3> (front, sizes)  c = Concat <axis = 3> (a, b)  y = Concat <axis = 3> (b, c)")
    assert [node.op_type for node in model.graph if node.op_type != "Constant"] == [
        "Reshape",
        "Split",
        "Concat",
        "Concat",
        "Reshape",
    ]


def test_rows_that_were_only_transposed_are_the_original_rows() -> None:
    model = with_shapes(BEFORE % "y = Identity (front)")
    front = next(node for node in model.graph if node.op_type == "Transpose")
    assert TokensFirst(model.graph, front).rows(front.outputs[0]) is model.graph.inputs[0]


def _assert_same(text: str, turned: ir.Model) -> None:
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 3, 16), "one": (2, 3, 4), "cos": (2, 3, 2), "sin": (2, 3, 2), "factor": (2, 1, 3, 1)}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    (heads,), (rows,) = run_model(with_shapes(BEFORE % text), feeds), run_model(turned, feeds)
    batch, _, tokens, _ = heads.shape
    np.testing.assert_allclose(rows, heads.transpose(0, 2, 1, 3).reshape(batch, tokens, -1), rtol=0, atol=1e-6)
