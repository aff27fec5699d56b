"""The torch reference as `skip-validate --reference` runs it."""

from __future__ import annotations

import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.checkpoint_folder import Checkpoint
from skipdecode.exporter.reference import skip_schedule
from skipdecode.exporter.reference_run import _load, _states, answer
from skipdecode.exporter.round_weights import round_weights
from skipdecode.schedule import Schedule, full_depth
from tests.exporter.test_merge_adapter import adapt
from tests.models import LAYERS, RELATIVES
from tests.zoo import Zoo, edit_config


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bamba", {"attn_layer_indices": None}),
        ("lfm2", {"layer_types": ["conv", "conv"]}),
        ("recurrent_gemma", {"block_types": ["recurrent"]}),
    ],
)
def test_a_model_may_have_no_attention_at_all(name: str, settings: dict[str, object]) -> None:
    """transformers takes a run's length from a layer with attention."""
    config = RELATIVES[name](num_hidden_layers=2, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = _states(model, full_depth(2), [5, 6, 7], [8, 9])
    assert {name.rpartition(".")[0] for name in found} <= {"past_conv_state", "past_recurrent_state"}
    assert {name.rpartition(".")[2] for name in found} == {"0", "1"}


def test_keys_that_transformers_caches_per_query_head_are_reduced_to_the_models_kv_heads() -> None:
    """As Falcon's are."""
    config = RELATIVES["falcon"]()
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = _states(model, full_depth(LAYERS), [5, 6, 7], [8, 9])
    assert config.num_kv_heads < config.num_attention_heads
    assert {array.shape[:2] for array in found.values()} == {(config.num_kv_heads, 4)}


def test_values_narrower_than_keys_are_as_wide_as_the_kv_buffer_holds_them() -> None:
    config = RELATIVES["mimo_v2_flash"]()
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = _states(model, full_depth(LAYERS), [5, 6, 7], [8, 9])
    assert config.v_head_dim < config.head_dim
    heads = {0: config.num_key_value_heads, 1: 2 * config.num_key_value_heads}  # in layers with a window
    for name, array in found.items():
        assert array.shape == (heads[int(name.rpartition(".")[2]) % 2], 4, config.head_dim)
        assert name.startswith("past_key") or not array[..., config.v_head_dim :].any()


def test_the_reference_computes_in_fp32_with_weights_rounded_as_in_the_bundle(zoo: Zoo) -> None:
    given, taken = zoo.model("llama").state_dict(), _load(Checkpoint(zoo.checkpoint("llama")), torch.float16).state_dict()
    assert any((given[name] != weight).any() for name, weight in taken.items())
    for name, weight in taken.items():
        torch.testing.assert_close(weight, given[name].half().float(), rtol=0, atol=0)


def test_an_adapter_is_merged_into_the_reference(zoo: Zoo, tmp_path: Path) -> None:
    adapted = adapt(zoo.model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), tmp_path)
    taken = _load(Checkpoint(zoo.checkpoint("llama"), adapter=tmp_path), torch.float32).state_dict()
    wanted = adapted.merge_and_unload().state_dict()
    assert any((zoo.model("llama").state_dict()[name] != weight).any() for name, weight in taken.items())
    for name, weight in taken.items():
        torch.testing.assert_close(weight, wanted[name], rtol=0, atol=0)


def test_the_rounded_model_is_given_the_tokens_of_the_exact_one(zoo: Zoo, tmp_path: Path) -> None:
    prompt = [5, 6, 7]
    request = {
        "model": str(zoo.checkpoint("opt")), "dtype": "float32", "dimensions": {}, "rounding": {"bits": 4, "whole_rows": False},
        "runs": {"v2": {"layers": [2], "warmup_layers": 1, "prompts": [prompt], "new": 4}},
    }  # fmt: skip
    answer(request, tmp_path / "out.safetensors")
    found, model = load_file(tmp_path / "out.safetensors"), zoo.model("opt")
    round_weights(model, 4, whole_rows=False)
    schedule = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=(2,))
    with torch.no_grad(), skip_schedule(model, schedule, prompt_length=len(prompt)):
        logits = model(torch.tensor([[*prompt, *found["v2.0.tokens"][:-1]]]), use_cache=False).logits
    torch.testing.assert_close(found["v2.0.rounded"], logits[0, len(prompt) - 1 :])
    assert (found["v2.0.rounded"] - found["v2.0.logits"]).abs().max() > 0.01


def test_a_reference_that_lacks_a_weight_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    """transformers fills in missing weights at random."""
    weights = shutil.copytree(zoo.checkpoint("llama"), tmp_path, dirs_exist_ok=True) / "model.safetensors"
    state = load_file(weights)
    del state["model.layers.2.mlp.up_proj.weight"]
    save_file(state, weights)
    with pytest.raises(ModelNotSupportedError, match=r"the checkpoint lacks model\.layers\.2\.mlp\.up_proj\.weight"):
        _load(Checkpoint(tmp_path), torch.float32)


@pytest.mark.parametrize("settings", [{"_attn_implementation": "flash_attention_2"}, {"quantization_config": {}}])
def test_settings_for_another_machine_or_without_effect_do_not_matter(
    settings: dict[str, object], zoo: Zoo, tmp_path: Path
) -> None:
    edit_config(shutil.copytree(zoo.checkpoint("llama"), tmp_path, dirs_exist_ok=True), **settings)
    for name, weight in _load(Checkpoint(tmp_path), torch.float32).state_dict().items():
        torch.testing.assert_close(weight, zoo.model("llama").state_dict()[name], rtol=0, atol=0)
