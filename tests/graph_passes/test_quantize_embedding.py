"""A lookup in a table becomes one in quantised blocks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.quantization import METHODS, Quantization
from skipdecode.graph_passes.quantize_embedding import QuantizeEmbeddingPass
from skipdecode.graph_passes.quantize_weights import QuantizeWeightsPass
from tests.graph_passes.running import relative_error, run_model
from tests.graph_passes.test_clean_trace import with_weight

TOKENS, WIDTH = 11, 128
TABLE = np.random.default_rng(0).standard_normal((TOKENS, WIDTH)).astype(np.float32)
EMBED = """<ir_version: 10, opset_import: ["" : 24]>
g (int64[B,S] input_ids, float[B,S,128] x) => (float[B,S,128] hidden) { hidden = Gather (weight, input_ids) }"""
HEAD = """<ir_version: 10, opset_import: ["" : 24]>
g (float[B,128] x) => (float[B,11] y) { turned = Transpose <perm = [1, 0]> (weight)  y = MatMul (x, turned) }"""


def _model(text: str) -> ir.Model:
    return with_weight(text, "embed_tokens.weight", TABLE)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("bits", "block"), [(4, 32), (8, 32), (4, 64), (8, 128)])
def test_a_looked_up_row_equals_the_quantised_heads_row(bits: int, block: int, method: str) -> None:
    embed, head, how = _model(EMBED), _model(HEAD), Quantization(bits=bits, block_size=block, method=method)
    assert QuantizeEmbeddingPass(how)(embed).modified
    assert QuantizeWeightsPass(how)(head).modified
    assert [node.op_type for node in embed.graph] == ["GatherBlockQuantized"]
    head.graph[0].attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)  # exact activations
    (rows,) = run_model(embed, {"input_ids": np.arange(TOKENS)[None], "x": np.empty((1, TOKENS, WIDTH), np.float32)})
    (columns,) = run_model(head, {"x": np.eye(WIDTH, dtype=np.float32)})
    np.testing.assert_allclose(rows[0], columns.T, rtol=0, atol=1e-6)
    assert 0 < relative_error(rows[0], TABLE) < (0.2 if bits == 4 else 0.02)


def test_embedding_and_head_store_the_same_bytes_under_the_same_names() -> None:
    embed, head = _model(EMBED), _model(HEAD)
    QuantizeEmbeddingPass(Quantization(bits=4))(embed)
    QuantizeWeightsPass(Quantization(bits=4))(head)
    found, expected = ({n: v.const_value.tobytes() for n, v in m.graph.initializers.items()} for m in (embed, head))  # type: ignore[union-attr]
    assert found == expected and len(found) == 2


@pytest.mark.parametrize(
    "text",
    [
        EMBED.replace("Gather (weight, input_ids)", "Gather <axis = 1> (weight, input_ids)"),
        EMBED.replace("input_ids", "position_ids"),
        EMBED.replace("{ ", "{ one = Constant <value_int = 1> ()  later = Add (input_ids, one) ").replace(
            "(weight, input_ids)", "(weight, later)"
        ),
    ],
    ids=["columns", "positions", "shifted ids"],
)
def test_it_declines_anything_but_a_lookup_of_token_ids(text: str) -> None:
    model = _model(text)
    assert not QuantizeEmbeddingPass(Quantization(bits=8))(model).modified


def test_it_declines_when_the_width_is_not_a_multiple_of_the_block() -> None:
    assert not QuantizeEmbeddingPass(Quantization(bits=8, block_size=256))(_model(EMBED)).modified
