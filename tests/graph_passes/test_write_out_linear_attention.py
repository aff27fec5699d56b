"""One operator that goes from token to token becomes products over all tokens, with the same results."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from skipdecode.graph_passes.write_out_linear_attention import WriteOutLinearAttentionPass
from tests.graph_passes.running import Array, run_model

BEFORE = """<ir_version: 10, opset_import: ["" : 27]>
layer (float[B,S,32] q, float[B,S,32] k, float[B,S,48] v, float[B,2,16,24] state, float[B,S,2] g, float[B,S,2] beta)
    => (float[B,S,48] y, float[B,2,16,24] present_state)
{
    y, present_state = LinearAttention <q_num_heads = 2, kv_num_heads = 2, update_rule = "gated_delta", scale = 0.5>
        (q, k, v, state, g, beta)
}
"""
GATED = BEFORE.replace("gated_delta", "gated").replace("g, beta)", "g)").replace(", float[B,S,2] beta", "")


def _feeds(tokens: int) -> dict[str, Array]:
    """Two rows with keys of length 1, logarithms of decays, and rates between 0 and 1."""
    rng = np.random.default_rng(tokens)
    sizes = {"q": (32,), "k": (32,), "v": (48,), "g": (2,), "beta": (2,)}
    feeds = {name: rng.standard_normal((2, tokens, *size)).astype(np.float32) for name, size in sizes.items()}
    feeds["state"] = rng.standard_normal((2, 2, 16, 24)).astype(np.float32)
    keys = feeds["k"].reshape(2, tokens, 2, 16)
    feeds["k"] = (keys / np.linalg.norm(keys, axis=-1, keepdims=True)).reshape(2, tokens, 32)
    feeds["g"], feeds["beta"] = -0.2 * np.abs(feeds["g"]), 1 / (1 + np.exp(-feeds["beta"]))
    return feeds


def _assert_gives_the_same(text: str, feeds: dict[str, Array], most_tokens: int = 512, error: float = 2e-6) -> None:
    model = ir.from_onnx_text(text)
    before = run_model(model, feeds)
    assert WriteOutLinearAttentionPass(max_tokens=most_tokens)(model).modified
    assert model.graph.opset_imports == {"": 24}
    assert "LinearAttention" not in [node.op_type for node in model.graph]
    for expected, found in zip(before, run_model(model, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=error * np.abs(expected).max())
    assert not WriteOutLinearAttentionPass(max_tokens=most_tokens)(model).modified


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 31, 200, 512])
@pytest.mark.parametrize("text", [BEFORE, GATED], ids=["gated_delta", "gated"])
def test_all_tokens_at_once_give_the_same_results_as_one_by_one(text: str, tokens: int) -> None:
    _assert_gives_the_same(text, _feeds(tokens))


@pytest.mark.parametrize("text", [BEFORE, GATED], ids=["gated_delta", "gated"])
def test_onnx_s_own_evaluator_which_is_stricter_than_onnx_runtime_gives_the_same(text: str) -> None:
    model, feeds = ir.from_onnx_text(text), _feeds(5)
    before = run_model(model, feeds)
    WriteOutLinearAttentionPass(max_tokens=8)(model)
    feeds = {value.name: feeds[value.name] for value in model.graph.inputs}
    for expected, found in zip(before, ReferenceEvaluator(ir.to_proto(model)).run(None, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_without_a_scale_the_operators_default_applies() -> None:
    _assert_gives_the_same(BEFORE.replace(", scale = 0.5", ""), _feeds(5))


@pytest.mark.parametrize(("rate", "error"), [(1, 2e-6), (1.9, 2e-4)])
def test_identical_tokens_that_forget_nothing_stay_exact(rate: float, error: float) -> None:
    """(1 - A)(1 + A^2)(1 + A^4).. over the whole pass is the same on paper but has terms of 1e150 here."""
    feeds = _feeds(512)
    feeds["k"][:] = feeds["k"][:, :1]
    feeds["g"][:], feeds["beta"][:] = 0, rate
    _assert_gives_the_same(BEFORE, feeds, error=error)


# the logarithm of decay of the tokens that forget much, and which tokens these are; it is -0.01 for the others
FORGETTING = {
    "all, so that e^(30 * 63) is no float": (-30, slice(None)),
    "the first half": (-30, slice(256)),
    "one in 64": (-2000, slice(None, None, 64)),
    "the first": (-1e5, slice(1)),
    "everything at once": (-np.inf, slice(5, 6)),
}


@pytest.mark.parametrize(("decay", "which"), FORGETTING.values(), ids=FORGETTING)
@pytest.mark.parametrize("text", [BEFORE, GATED], ids=["gated_delta", "gated"])
def test_tokens_that_forget_much_cost_later_ones_no_precision(text: str, decay: float, which: slice) -> None:
    """A difference of two sums over all tokens would lose everything: 0.6 of the state's largest number for `the first`."""
    feeds = _feeds(512)
    feeds["g"][:] = -0.01
    feeds["g"][:, which] = decay
    _assert_gives_the_same(text, feeds)


def test_blocks_are_joined_only_as_far_as_a_pass_has_tokens() -> None:
    counts = {}
    for most in (8, 16, 512):
        model = ir.from_onnx_text(BEFORE)
        WriteOutLinearAttentionPass(max_tokens=most)(model)
        counts[most] = sum(node.op_type == "MatMul" for node in model.graph)
    assert counts[16] == counts[8] + 2 and counts[512] == counts[8] + 2 * 6
    _assert_gives_the_same(BEFORE, _feeds(16), most_tokens=16)
