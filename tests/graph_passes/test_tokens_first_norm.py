"""A norm of heads behind their turn to the front before; in front of it after."""

from __future__ import annotations

import numpy as np
import pytest

from skipdecode.graph_passes.tokens_first_norm import TokensFirstNormPass
from tests.graph_passes.running import run_model, with_shapes

NORM = """<ir_version: 10, opset_import: ["" : 24]>
g (float[B,S,2,4] x) => (float[B,2,S,4] y) <float[4] scale = {1.0, 2.0, 3.0, 4.0}>
{ turned = Transpose <perm = [0, 2, 1, 3]> (x)  y = RMSNormalization <epsilon = 0.001> (turned, scale) }"""


@pytest.mark.parametrize("norm", ["RMSNormalization", "LayerNormalization"])
def test_the_turn_comes_behind_the_norm_with_the_same_result(norm: str) -> None:
    text = NORM.replace("RMSNormalization", norm)
    before, after = with_shapes(text), with_shapes(text)
    assert TokensFirstNormPass()(after).modified
    assert [node.op_type for node in after.graph] == [norm, "Transpose"]
    assert after.graph[0].outputs[0].shape == before.graph.inputs[0].shape, "others ask for its shape"
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 3, 2, 4)).astype(np.float32)}
    (expected,), (found,) = run_model(before, feeds), run_model(after, feeds)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[0, 2, 1, 3]", "[0, 1, 3, 2]"),
        ("<epsilon = 0.001>", "<epsilon = 0.001, axis = 2>"),
        ("turned = Transpose <perm = [0, 2, 1, 3]> (x)", "turned = Sqrt (x)"),
        ("(turned, scale)", "(turned, scale)  z = Sqrt (turned)"),
        ("(float[B,2,S,4] y)", "(float[B,2,S,4] y, float[B,2,S,4] turned)"),
    ],
    ids=["another last axis", "over more axes", "no turn", "another reader", "an output"],
)
def test_it_declines_where_the_norm_is_not_of_each_head_alone(old: str, new: str) -> None:
    text = NORM.replace(old, new).replace("(float[B,2,S,4] y", "(float[K,L,M,N] y")
    assert not TokensFirstNormPass()(with_shapes(text)).modified


def test_a_second_run_changes_nothing() -> None:
    model = with_shapes(NORM)
    TokensFirstNormPass()(model)
    assert not TokensFirstNormPass()(model).modified
