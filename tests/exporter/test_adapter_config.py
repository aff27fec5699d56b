"""An adapter's settings: which model it adapts, and what cannot be merged into it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import save

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter import adapter_config
from skipdecode.exporter.adapter_config import base_model
from skipdecode.exporter.model_names import load_config
from tests.models import CONFIGS


def _adapter(folder: Path, **settings: object) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM", **settings}))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder of a model without weights."""
    CONFIGS["llama"]().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva"])
def test_an_adapter_names_its_base_model(init: object, base: Path, tmp_path: Path) -> None:
    folder = _adapter(tmp_path / "adapter", base_model_name_or_path=str(base), init_lora_weights=init)
    assert base_model(str(folder)) == str(base)


def test_a_folder_with_both_settings_is_an_adapter(base: Path, tmp_path: Path) -> None:
    """Some trainers save the base model's config.json with the adapter."""
    folder = _adapter(tmp_path / "adapter", base_model_name_or_path=str(base))
    CONFIGS["llama"]().save_pretrained(folder)
    assert base_model(str(folder)) == str(base)


@pytest.mark.parametrize("name", ["opt-1.3b", "opt-125m"])
def test_a_model_is_no_adapter(name: str, base: Path) -> None:
    assert base_model(name) is None and base_model(str(base)) is None


def test_an_adapter_of_opt_1_3b_has_its_configuration_and_no_files_yet(tmp_path: Path) -> None:
    folder = _adapter(tmp_path / "adapter", base_model_name_or_path="opt-1.3b")
    (folder / "adapter_model.safetensors").write_bytes(save({}))
    config, checkpoint = load_config(str(folder))
    assert config.hidden_size == 2048 and checkpoint is None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"base_model_name_or_path": None}, r"adapter_config\.json: names no base model; set base_model_name_or_path there"),
        ({"base_model_name_or_path": 5}, r"adapter_config\.json: names no base model; set base_model_name_or_path there"),
        (
            {"base_model_name_or_path": "./gone"},
            r"adapter_config\.json: its base model \./gone is not a folder; .*, or set",
        ),
        ({"base_model_name_or_path": "empty"}, r"its base model empty holds no config\.json; .*, or set base_model"),
        ({"base_model_name_or_path": "other"}, "its base model other is an adapter, too; merge that into its own base first"),
        ({"base_model_name_or_path": "\ud800"}, r"adapter_config\.json: names no base model"),
        (
            {"peft_type": "PROMPT_TUNING"},
            "an adapter of kind PROMPT_TUNING, which is not merged here; give a LoRA adapter, or",
        ),
        (
            {"peft_type": "PSOFT"},
            "is an adapter of kind PSOFT, which is not merged here; give a LoRA adapter, or merge it",
        ),
        ({"peft_type": None}, "is an adapter of kind None, which is not merged here"),
        ({"peft_type": ["LORA"]}, "is an adapter of kind ..LORA.., which is not merged here"),
        ({"task_type": "SEQ_CLS"}, "adapter: is an adapter for SEQ_CLS; give one for CAUSAL_LM"),
        ({"revision": "v1"}, "adapter: adapts revision v1 of .*base; merge it yourself: `AutoPeft"),
        ({"layer_replication": [[0, 2], [1, 4]]}, "repeats its base model's layers .layer_replication.; merge it yourself"),
        (
            {"init_lora_weights": "pissa"},
            "weights that are not its base model's .init_lora_weights 'pissa'.; merge it yourself",
        ),
        ({"init_lora_weights": "pissa_niter_16"}, "from weights that are not its base model's"),
        ({"init_lora_weights": "loftq"}, "from weights that are not its base model's"),
        ({"init_lora_weights": []}, "from weights that are not its base model's"),
    ],
)
def test_what_cannot_be_merged_gives_one_line(
    settings: dict[str, object], says: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    _adapter(tmp_path / "other", base_model_name_or_path=str(base))
    folder = _adapter(tmp_path / "adapter", **{"base_model_name_or_path": str(base), **settings})
    with pytest.raises(ModelNotSupportedError, match=says) as caught:
        base_model(str(folder))
    assert "\n" not in str(caught.value)


def test_an_adapter_of_itself_is_refused(tmp_path: Path) -> None:
    folder = _adapter(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "adapter"))
    with pytest.raises(ModelNotSupportedError, match=r"its base model .*adapter is an adapter, too"):
        base_model(str(folder))


def test_without_peft_one_line_says_how_to_get_it(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(adapter_config, "find_spec", lambda name: None if name == "peft" else found(name))
    folder = _adapter(tmp_path / "adapter", base_model_name_or_path=str(base))
    with pytest.raises(ModelNotSupportedError, match="adapter: is a peft adapter; `pip install peft`, with which it is merged"):
        base_model(str(folder))


def test_settings_that_are_not_json_give_one_line(tmp_path: Path) -> None:
    folder = _adapter(tmp_path / "adapter")
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelNotSupportedError, match=r"adapter_config\.json: is not JSON"):
        base_model(str(folder))
