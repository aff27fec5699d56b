"""A peft adapter's files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.load_adapter import Adapter, load_adapter
from tests.exporter.test_merge_adapter import adapt
from tests.models import MAX_LENGTH
from tests.zoo import Zoo, edit_settings


@pytest.fixture(scope="module")
def saved(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a LoRA adapter."""
    folder = tmp_path_factory.mktemp("adapter")
    adapt(zoo.model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), folder)
    return folder


def test_an_export_warns_once_of_settings_of_a_newer_peft(
    saved: Path, zoo: Zoo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(saved, tmp_path / "adapter")
    edit_settings(folder / "adapter_config.json", new_setting=5, base_model_name_or_path=str(zoo.checkpoint("llama")))
    export(ExportRequest(model=str(folder), out=tmp_path / "bundle", max_length=MAX_LENGTH))
    (message,) = [message for message in caplog.messages if "peft" in message]
    assert message.startswith(f"{folder}: peft warns: Unexpected keyword arguments ['new_setting']")


def test_weights_may_be_in_torchs_format(saved: Path, tmp_path: Path) -> None:
    wanted = load_adapter(saved).weights
    shutil.copy(saved / "adapter_config.json", tmp_path)
    torch.save(wanted, tmp_path / "adapter_model.bin")
    found = load_adapter(tmp_path).weights
    assert wanted and found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (Path.unlink, "holds no adapter_model.safetensors or adapter_model.bin; save the adapter again"),
        (lambda file: file.write_bytes(b"\0" * 20), "adapter_model.safetensors: cannot be read"),
        (
            lambda file: save_file({"lora": torch.tensor([1.0, float("nan")])}, file),
            "lora holds nan or infinity; save the",
        ),
        (lambda file: torch.save([1], file.rename(file.with_suffix(".bin"))), "adapter_model.bin: is not a flat dict of tensors"),
        (lambda file: file.with_name("adapter_config.json").write_text('{"peft_type": "NEW"}'), r"peft rejects it \(.*NEW"),
    ],
)
def test_what_cannot_be_read_gives_one_line(damage: Callable[[Path], object], says: str, saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "adapter")
    damage(folder / "adapter_model.safetensors")
    with pytest.raises(ModelNotSupportedError, match=says) as caught:
        load_adapter(folder)
    assert str(caught.value).startswith(str(folder)) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "vocabulary"),
    [
        ({}, 99),
        ({"model.embed_tokens.weight": 99}, 99),
        ({"model.embed_tokens.weight": 101, "lm_head.weight": 101}, 101),
        ({"model.embed_tokens.token_adapter.base_layer.weight": 101, "lm_head.base_layer.weight": 101}, 101),
        ({"transformer.wte.weight": 97, "lm_head.weight": 97}, 97),
    ],
)
def test_the_vocabulary_is_that_of_embedding_and_head(rows: dict[str, int], vocabulary: int) -> None:
    assert _adapter(rows).vocabulary(99) == vocabulary


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"embed_tokens.weight": 101}, "holds embed_tokens for 101 tokens, its base model 99; save it with embedding and head"),
        ({"embed_tokens.weight": 101, "lm_head.weight": 100}, "holds embed_tokens for 101 tokens and lm_head for 100 tokens"),
        ({"embed_tokens.weight": 99, "lm_head.weight": 100}, "holds embed_tokens for 99 tokens and lm_head for 100 tokens"),
    ],
)
def test_an_embedding_or_a_head_of_another_size_does_not_come_alone(rows: dict[str, int], says: str) -> None:
    with pytest.raises(ModelNotSupportedError, match=says):
        _adapter(rows).vocabulary(99)


def _adapter(rows: dict[str, int], **settings: Any) -> Adapter:
    """One with matrices of so many rows."""
    weights = {f"base_model.model.{name}": torch.zeros(count, 4) for name, count in rows.items()}
    return Adapter(folder=Path("adapter"), config=peft.LoraConfig(**settings), weights=weights)


def test_of_a_whole_model_the_text_parts_weights_are_taken_by_its_names() -> None:
    text = torch.nn.ModuleDict(
        {"model": torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4)}), "lm_head": torch.nn.Linear(4, 4)}
    )
    rows = {
        "model.language_model.q_proj.lora_A.weight": 2, "model.language_model.q_proj.base_layer.bias": 1, "lm_head.weight": 4,
        "model.visual.q_proj.lora_A.weight": 3,
    }  # fmt: skip
    adapter = _adapter(rows, target_modules="all-linear", exclude_modules=["x"], alpha_pattern={"q_proj": 3})
    weights, config = adapter.of_text_part(text)
    assert {name: len(value) for name, value in weights.items()} == {
        "base_model.model.model.q_proj.lora_A.weight": 2, "base_model.model.model.q_proj.base_layer.bias": 1,
        "base_model.model.lm_head.weight": 4,
    }  # fmt: skip
    assert (config.target_modules, config.exclude_modules, config.alpha_pattern) == ({"model.q_proj"}, None, {"q_proj": 3})
    assert adapter.config.target_modules == "all-linear"


@pytest.mark.parametrize(
    "settings", [{"alpha_pattern": {"model.visual.q_proj": 3}}, {"target_parameters": ["experts.down_proj"]}]
)
def test_parameters_that_are_named_in_the_whole_model_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelNotSupportedError, match="adapter: names parameters of a model that also sees or hears; merge it"):
        _adapter({}, target_modules=["q_proj"], **settings).of_text_part(torch.nn.Module())
