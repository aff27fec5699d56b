"""The rotary embedding that layers are traced with, against transformers' own."""

from __future__ import annotations

import onnx
import pytest
import torch
from transformers.models.cohere_compass.modeling_cohere_compass import CohereCompassRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from skipdecode.exporter.rotary import freeze_rotary, rotary_base
from tests.models import RELATIVES
from tests.zoo import Zoo


@pytest.mark.parametrize(
    ("name", "kind", "layer"),
    [
        ("qwen3_5_text", Qwen3_5TextRotaryEmbedding, ()),
        ("cohere_compass_text", CohereCompassRotaryEmbedding, ("sliding_attention",)),
    ],
)
def test_three_equal_positions_of_a_token_rotate_as_one(name: str, kind: type[torch.nn.Module], layer: tuple[str, ...]) -> None:
    config, positions = RELATIVES[name](), torch.tensor([[3, 4, 5], [0, 1, 2]])
    rows = torch.zeros(2, 3, 64, dtype=torch.float16)
    wanted = kind(config)(rows, positions.expand(3, -1, -1), *layer)
    frozen = freeze_rotary(kind(config))
    for given in (positions, positions.expand(3, -1, -1)):  # a layer's, and those of the model's own forward pass
        for found, tables in zip(frozen(rows, given, *layer), wanted, strict=True):
            torch.testing.assert_close(found, tables, rtol=0, atol=0)


def test_the_rotation_by_three_positions_is_one_operator_each_for_queries_and_keys(zoo: Zoo) -> None:
    graph = onnx.load(zoo.bundle("qwen3_5_text") / "graphs" / "layer_002.onnx", load_external_data=False).graph
    assert [node.op_type for node in graph.node].count("RotaryEmbedding") == 2


def test_granites_layers_have_bases_of_their_own_and_some_layers_rotate_nothing() -> None:
    bases = [100.0, 10000.0, 0, 100.0, 100.0, 100.0]
    assert [rotary_base(RELATIVES["granite_swa"](layer_rope_theta=bases), layer) for layer in range(6)] == bases
    compass = RELATIVES["cohere_compass_text"]()
    assert [rotary_base(compass, layer) for layer in range(2)] == [None, 0]
