"""A decomposed rotary embedding that rotates backward becomes one operator."""

from __future__ import annotations

import numpy as np
import pytest

from skipdecode.graph_passes.fuse_backward_rotary import FuseBackwardRotaryPass
from tests.graph_passes.running import run_model, with_shapes
from tests.graph_passes.test_fuse_narrow_rotary import ROTARY as FORWARD

NARROW = FORWARD.replace("minus = Neg (x2)", "minus = Neg (x1)").replace("(minus, x1)", "(x2, minus)")
WIDE = NARROW.replace("float16", "float").replace("(cosine16, one)", "(cosine, one)").replace("(sine16, one)", "(sine, one)")


@pytest.mark.parametrize(("text", "casts"), [(WIDE, 0), (NARROW, 2)], ids=["fp32", "narrow"])
def test_it_becomes_one_operator_with_the_same_result(text: str, casts: int) -> None:
    before, after = with_shapes(text), with_shapes(text)
    assert FuseBackwardRotaryPass()(after).modified
    assert sorted(node.op_type for node in after.graph) == [*casts * ["Cast"], "Cos", "Neg", "RotaryEmbedding", "Sin"]
    rng = np.random.default_rng(0)
    feeds = {"h": rng.standard_normal((2, 2, 3, 8)), "f": rng.standard_normal((2, 3, 4)).astype(np.float32)}
    feeds["h"] = feeds["h"].astype(np.float16 if casts else np.float32)
    (expected,), (found,) = run_model(before, feeds), run_model(after, feeds)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-3 if casts else 1e-6)


@pytest.mark.parametrize(
    "text",
    [FORWARD, WIDE.replace("(x2, minus)", "(minus, x2)"), WIDE.replace("float[B,2,S,8] h", "float[B,N,S,8] h")],
    ids=["forward", "other half", "heads not static"],
)
def test_it_declines_anything_but_a_backward_rotation(text: str) -> None:
    assert not FuseBackwardRotaryPass()(with_shapes(text)).modified


def test_a_second_run_changes_nothing() -> None:
    model = with_shapes(WIDE)
    FuseBackwardRotaryPass()(model)
    assert not FuseBackwardRotaryPass()(model).modified
