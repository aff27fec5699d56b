"""A router of many operators becomes the mixture operator's own."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.fuse_router import FuseRouterPass
from skipdecode.graph_passes.lower_experts import LowerExpertsPass
from tests.graph_passes.running import run_model
from tests.graph_passes.test_lower_experts import EXPERTS, GRAPH, NARROW, WIDTH, mixture

BEST = "scores = Softmax (logits)  best, chosen = TopK (scores, last)  "
ROUTERS = {
    "the largest of a softmax": BEST + "weights = Identity (best)",
    "which add up to 1": BEST + "total = ReduceSum <keepdims = 1> (best, second)  weights = Div (best, total)",
    "the softmax of the largest": "best, chosen = TopK (logits, last)  weights = Softmax (best)",
}
# as traced in fp16, with softmax and sums in fp32
NARROW_ROUTERS = {
    "the largest of a softmax": "wide = Softmax (logits)  scores = Cast <to = 1> (wide)  best, chosen = TopK (scores, last)  "
    "weights = Cast <to = 10> (best)",
    "which add up to 1": "wide = Cast <to = 1> (logits)  scores = Softmax (wide)  best, chosen = TopK (scores, last)  "
    "total = ReduceSum <keepdims = 1> (best, second)  share = Div (best, total)  weights = Cast <to = 10> (share)",
    "the softmax of the largest": "wide = Cast <to = 1> (logits)  best, chosen = TopK (wide, last)  share = Softmax (best)  "
    "weights = Cast <to = 10> (share)",
}
OTHERS = {
    "scaled": BEST + "weights = Mul (best, best)",
    "sigmoids": "scores = Sigmoid (logits)  best, chosen = TopK (scores, last)  weights = Identity (best)",
    "chosen by others": BEST.replace("(scores,", "(biased,").replace("best,", "biased = Add (scores, none)  best,")
    + "weights = GatherElements <axis = 1> (scores, chosen)",
    "divided by the largest": BEST + "largest = ReduceMax <keepdims = 1> (best, second)  weights = Div (best, largest)",
    "the smallest": BEST.replace("TopK", "TopK <largest = 0>") + "weights = Identity (best)",
}


def _routed(router: str, graph: str = GRAPH) -> ir.Model:
    """`graph` with a router on rows [B,S,8] before it and a sum after it, as in a layer."""
    kind = "float16" if "float16" in graph else "float"
    text = graph.replace(f"{kind}[T,8] x, int64[T,2] chosen, {kind}[T,2] weights", f"{kind}[B,S,8] hidden, {kind}[5,8] router")
    text = text.replace(f"{kind}[T,8] y", f"{kind}[B,S,8] z").replace(
        "\n    length =", f"\n    x = Reshape (hidden, flat)  logits = Gemm <transB = 1> (x, router)  {router}\n    length ="
    )
    text = text.replace("int64[1] first", "int64[2] flat = {-1, 8}, int64[1] first")
    text = text.replace("\n}", "\n    shape_3 = Shape (hidden)\n    whole = Reshape (y, shape_3)\n    z = Add (whole, hidden)\n}")
    weights = np.random.default_rng(2).standard_normal((EXPERTS, WIDTH))
    model = mixture(text, more={"router": weights.astype(np.float16 if kind == "float16" else np.float32)})
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


@pytest.mark.parametrize("router", NARROW_ROUTERS.values(), ids=NARROW_ROUTERS)
def test_a_narrow_router_is_fused_without_its_casts(router: str) -> None:
    before, after = _routed(router, NARROW), _routed(router, NARROW)
    LowerExpertsPass()(after)
    assert FuseRouterPass()(after).modified
    assert sorted(node.op_type for node in after.graph) == ["Add", "Gemm", "MoE", "Reshape"], "no cast is left"
    given = {"hidden": np.random.default_rng(3).standard_normal((2, 3, WIDTH)).astype(np.float16)}
    (expected,), (computed,) = run_model(before, given), run_model(after, given)
    np.testing.assert_allclose(computed, expected, rtol=0, atol=4e-3 * np.abs(expected).max())


@pytest.mark.parametrize("router", OTHERS.values(), ids=OTHERS)
def test_other_routers_stay(router: str) -> None:
    model = _routed(router)
    LowerExpertsPass()(model)
    assert not FuseRouterPass()(model).modified
    assert "ScatterElements" in [node.op_type for node in model.graph]


def test_an_fp32_router_of_narrow_rows_stays() -> None:
    """Rounding its logits to the rows' dtype could choose other experts."""
    wide = "wide = Cast <to = 1> (logits)  twice = Add (wide, wide)  scores = Softmax (twice)  "
    model = _routed(f"{wide}best, chosen = TopK (scores, last)  weights = Cast <to = 10> (best)", NARROW)
    LowerExpertsPass()(model)
    assert not FuseRouterPass()(model).modified
