"""An adapter that is merged while weights are read, against peft's own merge of the whole model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import save_file

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.adapter_config import MERGED_KINDS
from skipdecode.exporter.checkpoint import CheckpointSource
from skipdecode.exporter.merge_adapter import AdaptedSource
from skipdecode.exporter.model_names import load_config
from skipdecode.exporter.skeleton import Skeleton, build_skeleton
from skipdecode.exporter.weights import TensorSource
from tests.exporter.quantised_checkpoints import in_fp8
from tests.exporter.test_text_parts import vision_model
from tests.models import VOCABULARY
from tests.zoo import Zoo, edit_settings

_PROJECTIONS = ["q_proj", "down_proj"]


def _lora(**settings: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "init_lora_weights": False, "target_modules": _PROJECTIONS, **settings})


def adapt(model: Any, config: peft.PeftConfig, folder: Path, *, alike: bool = False) -> Any:
    """Put an adapter on a model that was loaded from a checkpoint, and save it in `folder`.

    Args:
        alike: all weights change by the same number, so that tied ones stay equal; otherwise at random.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of what is meant
        adapted = peft.get_peft_model(model, config)
        torch.manual_seed(1)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 if alike else torch.randn_like(parameter) * 0.05)
        adapted.save_pretrained(folder)
    return adapted


def _merged_by_peft(adapted: Any) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights
        return {name: value.detach() for name, value in adapted.merge_and_unload().named_parameters()}


def _sources(adapter: Path) -> tuple[Skeleton, TensorSource, CheckpointSource]:
    """The model, its parameters with the adapter, and as they are stored."""
    config, checkpoint = load_config(str(adapter))
    assert checkpoint is not None and checkpoint.adapter == adapter
    skeleton = build_skeleton(config)
    stored = CheckpointSource(checkpoint.folder, skeleton)
    return skeleton, AdaptedSource(stored, adapter, skeleton), stored


def _read(adapter: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The model's parameters with the adapter, and as they are stored."""
    skeleton, merged, stored = _sources(adapter)
    found = ({name: read(name, shape) for name, shape in skeleton.shapes.items()} for read in (merged, stored))
    return next(found), next(found)


_PROJECTED = {f"{name}.weight" for name in _PROJECTIONS}
# adapter -> the model, its configuration, and the ends of the names of the parameters that it changes
_ADAPTERS: dict[str, tuple[str, Callable[[], peft.PeftConfig], set[str]]] = {
    "LoRA": ("llama", _lora, _PROJECTED),
    "DoRA": ("llama", lambda: _lora(use_dora=True), _PROJECTED),
    "ranks": ("llama", lambda: _lora(use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"down_proj": 5}), _PROJECTED),
    "one layer": (
        "llama",
        lambda: _lora(layers_to_transform=[2]),
        {f"2.{part}" for part in ("self_attn.q_proj.weight", "mlp.down_proj.weight")},
    ),
    "whole head": ("llama", lambda: _lora(modules_to_save=["lm_head"]), {*_PROJECTED, "lm_head.weight"}),
    "outer": ("llama", lambda: _lora(target_modules=["embed_tokens", "lm_head"]), {"embed_tokens.weight", "lm_head.weight"}),
    "biases": ("opt", lambda: _lora(target_modules=["q_proj"], bias="all"), {"bias", "q_proj.weight"}),
    "LoRA's bias": ("opt", lambda: _lora(target_modules=["q_proj"], lora_bias=True), {"q_proj.bias", "q_proj.weight"}),
    "tokens": ("gemma3", lambda: _lora(trainable_token_indices={"embed_tokens": [3, 5]}), {*_PROJECTED, "embed_tokens.weight"}),
    "transposed": ("gpt2", lambda: _lora(target_modules=["c_attn"], fan_in_fan_out=True), {"c_attn.weight"}),
    "experts": (
        "mixtral",
        lambda: _lora(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
        {"q_proj.weight", "experts.gate_up_proj", "experts.down_proj"},
    ),
    "IA3": (
        "llama",
        lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False),
        {"k_proj.weight"},
    ),
    "norms": ("llama", lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]), {"input_layernorm.weight"}),
}


@pytest.mark.parametrize("kind", _ADAPTERS)
def test_every_weight_is_what_peft_merges(kind: str, zoo: Zoo, tmp_path: Path) -> None:
    """Bit by bit; and of the stored ones, those that the adapter changes are changed, and no others."""
    name, config, changed = _ADAPTERS[kind]
    adapted = adapt(zoo.model(name), config(), tmp_path / "adapter")
    merged, stored = _read(tmp_path / "adapter")
    wanted = _merged_by_peft(adapted)
    for parameter, value in merged.items():
        torch.testing.assert_close(value, wanted[parameter], rtol=0, atol=0)
        assert torch.equal(value, stored[parameter]) is not parameter.endswith(tuple(changed)), parameter


@pytest.fixture
def own_environment() -> Iterator[None]:
    """The environment is as before afterwards: peft's BOFT makes gcc the C++ compiler of all later builds (CXX)."""
    with mock.patch.dict(os.environ):
        yield


# kind -> settings without which it cannot be made, or not small enough
_SETTINGS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10, "init_r": 4, "target_r": 4},
    "BOFT": {"boft_block_size": 8},
    "C3A": {"block_size": 16},
    "FOURIERFT": {"n_frequency": 20},
    "HRA": {"r": 2},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "OFT": {"oft_block_size": 8},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [3, 5]},
    "VERA": {"r": 4},
    "WAVEFT": {"n_frequency": 20},
}


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("kind", MERGED_KINDS)
def test_every_kind_that_is_taken_is_merged_as_by_peft(kind: str, zoo: Zoo, tmp_path: Path) -> None:
    settings = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **_SETTINGS.get(kind, {})}
    adapted = adapt(zoo.model("llama"), PEFT_TYPE_TO_CONFIG_MAPPING[kind](**settings), tmp_path / "adapter")
    merged, stored = _read(tmp_path / "adapter")
    assert any(not torch.equal(value, stored[name]) for name, value in merged.items())
    for name, value in _merged_by_peft(adapted).items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings"), [("opt", {"bias": "all"}), ("llama", {"modules_to_save": ["input_layernorm", "embed_tokens"]})]
)
def test_what_an_adapter_replaces_is_not_warned_of_as_unknown(
    name: str, settings: dict[str, Any], zoo: Zoo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapt(zoo.model(name), _lora(target_modules=["q_proj"], **settings), tmp_path / "adapter")
    skeleton, merged, stored = _sources(tmp_path / "adapter")
    for parameter, shape in skeleton.shapes.items():
        merged(parameter, shape)
    stored.warn_of_unread()
    assert not caplog.records


def _adapted_vision_model(folder: Path, **settings: Any) -> Any:
    vision_model("Qwen2VL").save_pretrained(folder / "base")
    base = transformers.Qwen2VLForConditionalGeneration.from_pretrained(folder / "base").eval()
    return adapt(base, _lora(**settings), folder / "adapter")


@pytest.mark.parametrize(
    "settings",
    [
        {"alpha_pattern": {"q_proj": 3}},
        {"target_modules": "all-linear"},
        {"target_modules": r".*language_model.*\.(q_proj|o_proj)"},
        {"bias": "all", "target_modules": ["q_proj"]},  # Qwen2's have one
    ],
)
def test_of_a_vision_model_the_text_part_is_merged(settings: dict[str, Any], tmp_path: Path) -> None:
    adapted = _adapted_vision_model(tmp_path, **settings)
    merged, stored = _read(tmp_path / "adapter")
    text = transformers.AutoModelForCausalLM.from_config(load_config(str(tmp_path / "adapter"))[0]).eval()
    text.load_state_dict(merged)
    ids = torch.tensor([[5, 6, 7, 8, 3, 9]])
    torch.testing.assert_close(text(ids).logits, adapted(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    text.load_state_dict(stored)
    assert (text(ids).logits - adapted(input_ids=ids).logits).abs().max() > 0.1


def test_of_a_vision_models_adapter_nothing_is_left_out_silently(tmp_path: Path) -> None:
    _adapted_vision_model(tmp_path, target_modules=["q_proj"])
    _rename(tmp_path / "adapter", "language_model.layers.3.self_attn.q_proj", "language_model.layers.3.mlp.experts.0.up_proj")
    with pytest.raises(
        ModelNotSupportedError, match=r"holds \S*layers\.3\.mlp\.experts\.0\.up_proj\S*, which its base model lacks"
    ):
        _read(tmp_path / "adapter")


def test_an_adapter_of_only_the_part_that_sees_is_refused(tmp_path: Path) -> None:
    _adapted_vision_model(tmp_path, target_modules=r".*visual.*\.qkv")
    with pytest.raises(ModelNotSupportedError, match="changes nothing in the part that reads text; export its base model"):
        _read(tmp_path / "adapter")


def test_an_adapter_and_a_model_in_half_precision_are_merged_in_fp32(zoo: Zoo, tmp_path: Path) -> None:
    zoo.model("llama").half().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = adapt(base, _lora(target_modules=["q_proj", "lm_head"]), tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the head is saved, too
        adapted.half().save_pretrained(tmp_path / "adapter")
    merged, stored = _read(tmp_path / "adapter")
    for name in (_QUERY, "lm_head.weight"):
        torch.testing.assert_close(merged[name], stored[name].float() + _change(adapted, name), rtol=0, atol=1e-7)
    assert stored[_QUERY].dtype == torch.float16


def test_the_base_models_weights_may_be_quantised(zoo: Zoo, tmp_path: Path) -> None:
    adapted = adapt(zoo.model("llama"), _lora(), tmp_path / "adapter")
    base = in_fp8(zoo.checkpoint("llama"), tmp_path / "base", None)
    edit_settings(_settings(tmp_path / "adapter"), base_model_name_or_path=str(base))
    merged, stored = _read(tmp_path / "adapter")
    assert not torch.equal(stored[_QUERY], zoo.model("llama").state_dict()[_QUERY])
    torch.testing.assert_close(merged[_QUERY], stored[_QUERY] + _change(adapted, _QUERY), rtol=0, atol=1e-7)


_QUERY = "model.layers.0.self_attn.q_proj.weight"


def _change(adapted: Any, name: str) -> torch.Tensor:
    """What LoRA adds to a matrix."""
    layer = adapted.base_model.model.get_submodule(name.removesuffix(".weight"))
    change: torch.Tensor = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
    return change * layer.scaling["default"]


@pytest.mark.parametrize("settings", [{"modules_to_save": ["embed_tokens"]}, {"target_modules": ["lm_head"]}])
def test_a_tied_embedding_may_not_differ_from_its_head(settings: dict[str, Any], zoo: Zoo, tmp_path: Path) -> None:
    adapt(zoo.model("gemma3"), _lora(**settings), tmp_path / "adapter")
    with pytest.raises(ModelNotSupportedError, match=r"embed_tokens\.weight and lm_head\.weight alike"):
        _read(tmp_path / "adapter")


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_tokens_may_have_been_added(name: str, settings: dict[str, Any], zoo: Zoo, tmp_path: Path) -> None:
    """peft saves embedding and head as a whole where they have another size, trained or not."""
    model = zoo.model(name)
    model.resize_token_embeddings(VOCABULARY + 2)
    adapted = adapt(model, _lora(**settings), tmp_path / "adapter", alike=name == "gemma3")
    skeleton, merged, _ = _sources(tmp_path / "adapter")
    wanted = _merged_by_peft(adapted)
    assert skeleton.vocab_size == skeleton.shapes["model.embed_tokens.weight"][0] == VOCABULARY + 2
    for parameter, shape in skeleton.shapes.items():
        torch.testing.assert_close(merged(parameter, shape), wanted[parameter], rtol=0, atol=0)


def _settings(adapter: Path) -> Path:
    return adapter / "adapter_config.json"


def _rename(adapter: Path, old: str, new: str) -> None:
    """Save the weights with `new` for `old` in their names; without those where `new` is empty."""
    weights = peft.load_peft_weights(str(adapter), device="cpu")
    save_file(
        {name.replace(old, new): value for name, value in weights.items() if new or old not in name},
        adapter / "adapter_model.safetensors",
    )


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda adapter, zoo: edit_settings(_settings(adapter), base_model_name_or_path=str(zoo.checkpoint("opt"))),
            r"lacks \S*decoder\.layers\.0\.self_attn\.q_proj\.lora_A"),
        (lambda adapter, zoo: _rename(adapter, "layers.3.mlp", "layers.3.moe"), r"lacks \S*layers\.3\.mlp\.down_proj\.lora_A"),
        (lambda adapter, zoo: _rename(adapter, "layers.3.mlp.down_proj.lora_B", ""), r"lacks \S*3\.mlp\.down_proj\.lora_B"),
        (lambda adapter, zoo: edit_settings(_settings(adapter), target_modules=["q_proj"]),
            r"holds \S*layers\.0\.mlp\.down_proj\.lora_A\S*, which its base model lacks; check base_model"),
        (lambda adapter, zoo: edit_settings(_settings(adapter), target_modules=["w_proj"]),
            r"peft rejects it \(Target modules .*w_proj.* not found"),
        (lambda adapter, zoo: edit_settings(_settings(adapter), r=3), r"peft rejects it \(size mismatch for \S*lora_A"),
    ],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_gives_one_line(
    damage: Callable[[Path, Zoo], None], says: str, zoo: Zoo, tmp_path: Path
) -> None:
    adapt(zoo.model("llama"), _lora(), tmp_path / "adapter")
    damage(tmp_path / "adapter", zoo)
    with pytest.raises(ModelNotSupportedError, match=says) as caught:
        _read(tmp_path / "adapter")
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"{tmp_path / 'adapter'}: ")


def test_an_adapter_that_works_on_activations_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    lora = _lora(target_modules=["q_proj"], alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM")
    adapt(zoo.model("llama"), lora, tmp_path / "adapter")
    with pytest.raises(ModelNotSupportedError, match=r"peft rejects it \(.*merg"):
        _read(tmp_path / "adapter")
