"""Query heads become tokens where there are many slots, with the same results."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.conventions import required_input, static_dim
from skipdecode.graph_passes.turn_queries_into_tokens import TurnQueriesIntoTokensPass
from skipdecode.graph_passes.write_out_attention import WriteOutAttentionPass
from tests.graph_passes.running import run_model, with_shapes

MOST = 24576 - 16  # slots that the kernel for one token takes at most, with heads of size 16


def _attention(heads: int, kv_heads: int, slots: int, mask: str = "bool[B,1,S,C]") -> ir.Model:
    keys = f"float[B,{kv_heads},{slots},16]"
    return with_shapes(f"""<ir_version: 10, opset_import: ["" : 24]>
    attend (float[B,{heads},S,16] query, {keys} key, {keys} value, {mask.replace("C", str(slots))} mask)
        => (float[B,{heads},S,16] attended) {{ attended = Attention <scale = 0.3> (query, key, value, mask) }}""")


def _lowered(model: ir.Model, slots: int) -> ir.Model:
    copy = model.clone()
    ir.passes.Sequential(WriteOutAttentionPass(slots=slots), TurnQueriesIntoTokensPass(slots=slots))(copy)
    return copy


@pytest.mark.parametrize(("heads", "kv_heads", "left"), [(8, 4, 4), (8, 2, 4), (12, 1, 4), (32, 4, 4), (10, 2, 0)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_heads_become_tokens_or_are_written_out_with_the_same_result(heads: int, kv_heads: int, left: int, tokens: int) -> None:
    before = _attention(heads, kv_heads, MOST + 8)
    after = _lowered(before, MOST + 8)
    found = [static_dim(required_input(node), 1) for node in after.graph if node.op_type == "Attention"]
    assert found == ([left] if left >= 4 else [])
    rng = np.random.default_rng(0)
    shapes = {"query": (2, heads, tokens, 16), **dict.fromkeys(("key", "value"), (2, kv_heads, MOST + 8, 16))}
    feeds = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    feeds["mask"] = rng.random((2, 1, tokens, MOST + 8)) < 0.01  # differs for each row and token
    np.testing.assert_allclose(run_model(after, feeds)[0], run_model(before, feeds)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (8, 2), (12, 1), (32, 4)])
def test_a_second_run_changes_nothing_and_nothing_is_written_out_after_it(heads: int, kv_heads: int) -> None:
    model = _attention(heads, kv_heads, MOST + 8)
    assert TurnQueriesIntoTokensPass(slots=MOST + 8)(model).modified
    assert not TurnQueriesIntoTokensPass(slots=MOST + 8)(model).modified
    assert not WriteOutAttentionPass(slots=MOST + 8)(model).modified


def test_slots_that_the_kernel_for_one_token_takes_are_left_alone() -> None:
    graph = _attention(8, 2, MOST)
    assert not TurnQueriesIntoTokensPass(slots=MOST)(graph).modified and not WriteOutAttentionPass(slots=MOST)(graph).modified


@pytest.mark.parametrize(
    "model", [_attention(8, 8, MOST + 8), _attention(8, 2, MOST + 8, "float[B,8,S,C]")], ids=["no shared keys", "biases"]
)
def test_heads_that_cannot_become_tokens_are_written_out(model: ir.Model) -> None:
    assert not TurnQueriesIntoTokensPass(slots=MOST + 8)(model).modified
    assert WriteOutAttentionPass(slots=MOST + 8)(model).modified
