"""The torch reference as `skip-validate --reference` asks it."""

from __future__ import annotations

import pytest
import transformers

from skipdecode.exporter.reference_run import _states
from skipdecode.schedule import full_depth
from tests.models import RELATIVES


@pytest.mark.parametrize(
    ("name", "settings"),
    [("bamba", {"attn_layer_indices": None}), ("lfm2", {"layer_types": ["conv", "conv"]})],
)
def test_a_model_may_have_no_attention_at_all(name: str, settings: dict[str, object]) -> None:
    """transformers asks a layer with attention how long a run is."""
    config = RELATIVES[name](num_hidden_layers=2, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = _states(model, full_depth(2), [5, 6, 7], [8, 9])
    assert {name.rpartition(".")[0] for name in found} <= {"past_conv_state", "past_recurrent_state"}
    assert {name.rpartition(".")[2] for name in found} == {"0", "1"}
