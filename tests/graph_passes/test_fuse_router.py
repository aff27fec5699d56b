"""A router of many operators before, one that the mixture has itself after."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.fuse_router import FuseRouterPass
from skipdecode.graph_passes.lower_experts import LowerExpertsPass
from tests.graph_passes.running import run_model
from tests.graph_passes.test_lower_experts import EXPERTS, GRAPH, WIDTH, mixture

BEST = "scores = Softmax (logits)  best, chosen = TopK (scores, last)  "
ROUTERS = {
    "the largest of a softmax": BEST + "weights = Identity (best)",
    "which add up to 1": BEST + "total = ReduceSum <keepdims = 1> (best, second)  weights = Div (best, total)",
    "the softmax of the largest": "best, chosen = TopK (logits, last)  weights = Softmax (best)",
}
OTHERS = {
    "scaled": BEST + "weights = Mul (best, best)",
    "sigmoids": "scores = Sigmoid (logits)  best, chosen = TopK (scores, last)  weights = Identity (best)",
    "chosen by others": BEST.replace("(scores,", "(biased,").replace("best,", "biased = Add (scores, none)  best,")
    + "weights = GatherElements <axis = 1> (scores, chosen)",
    "the smallest": BEST.replace("TopK", "TopK <largest = 0>") + "weights = Identity (best)",
}


def _routed(router: str) -> ir.Model:
    """`GRAPH` with a router on rows [B,S,8] and a sum behind, as a layer has it."""
    text = GRAPH.replace("float[T,8] x, int64[T,2] chosen, float[T,2] weights", "float[B,S,8] hidden, float[5,8] router")
    text = text.replace("float[T,8] y", "float[B,S,8] z").replace(
        "\n    length =", f"\n    x = Reshape (hidden, flat)  logits = Gemm <transB = 1> (x, router)  {router}\n    length ="
    )
    text = text.replace("int64[1] first", "int64[2] flat = {-1, 8}, int64[1] first")
    text = text.replace(
        "(counted, first)",
        "(counted, first)\n    shape_3 = Shape (hidden)\n    whole = Reshape (y, shape_3)\n    z = Add (whole, hidden)",
    )
    model = mixture(text, more={"router": np.random.default_rng(2).standard_normal((EXPERTS, WIDTH)).astype(np.float32)})
    ir.passes.Sequential(ir.passes.common.IdentityEliminationPass(), ir.passes.common.ShapeInferencePass())(model)
    return model


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_the_operator_routes_as_the_model_did(router: str) -> None:
    before, after = _routed(router), _routed(router)
    LowerExpertsPass()(after)
    assert FuseRouterPass()(after).modified
    found = [node.op_type for node in after.graph]
    assert sorted(found) == ["Add", "Gemm", "MoE", "Reshape"]
    given = {"hidden": np.random.default_rng(3).standard_normal((2, 3, WIDTH)).astype(np.float32)}
    (expected,), (computed,) = run_model(before, given), run_model(after, given)
    np.testing.assert_allclose(computed, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("router", OTHERS.values(), ids=OTHERS)
def test_other_routers_stay(router: str) -> None:
    model = _routed(router)
    LowerExpertsPass()(model)
    assert not FuseRouterPass()(model).modified
    assert "ScatterElements" in [node.op_type for node in model.graph]
