"""The tokenizer's files in a bundle, and the ids that end a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from skipdecode import manifest as manifests
from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter import tokenizer_files
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.tokenizer_files import end_ids
from tests.conftest import CONFIGS, MAX_LENGTH, Zoo


def _of_a_model_that_also_sees(**whole: Any) -> dict[str, Any]:
    text = {**CONFIGS["gemma3"]().to_dict(), "eos_token_id": 1}
    return {"model_type": "gemma3", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}, **whole}


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config": {"eos_token_id": [1, 106]}, "config": {"eos_token_id": 1}}, (1, 106)),
        ({"generation_config": {}, "config": {"eos_token_id": 1}}, ()),
        ({"config": {"eos_token_id": 5}}, (5,)),
        ({"config": {}}, ()),
        ({"config": _of_a_model_that_also_sees(eos_token_id=[1, 106])}, (1, 106)),
        ({"config": _of_a_model_that_also_sees()}, (1,)),
    ],
)
def test_rows_end_at_the_ids_at_which_transformers_ends_them(
    files: dict[str, dict[str, Any]], ids: tuple[int, ...], tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert end_ids(tmp_path, None) == ids
    its = {} if "generation_config" in files else {"config_file_name": "config.json", "_from_model_config": True}
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path, **its).eos_token_id
    assert ids == (tuple(theirs) if isinstance(theirs, list) else () if theirs is None else (theirs,))


def test_a_model_without_a_checkpoint_ends_rows_as_its_configuration_says() -> None:
    assert end_ids(None, CONFIGS["llama"]()) == (2,)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{broken", "generation_config.json: is not JSON"),
        ("[]", "generation_config.json: is not a JSON object"),
        ('{"eos_token_id": "2"}', "eos_token_id is '2'; write a whole number"),
        ('{"eos_token_id": [2, null]}', "eos_token_id is .2, None.; write a whole number"),
        ('{"eos_token_id": true}', "eos_token_id is True; write a whole number"),
    ],
)
def test_a_generation_config_that_cannot_be_read_is_one_line_before_anything_is_compiled(
    content: str, says: str, zoo: Zoo, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    zoo.model("llama").save_pretrained(folder)
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ModelNotSupportedError, match=says) as caught:
        export(ExportRequest(model=str(folder), out=tmp_path / "outs" / "bundle", max_length=MAX_LENGTH))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "outs").exists()


def test_a_file_that_cannot_be_read_is_not_taken_for_a_full_disk(zoo: Zoo, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    zoo.model("llama").save_pretrained(folder)
    (folder / "tokenizer_config.json").symlink_to("/proc/self/mem")  # whose first bytes are an input/output error
    with pytest.raises(ModelNotSupportedError, match=r"tokenizer_config\.json: cannot be read .Input/output error."):
        export(ExportRequest(model=str(folder), out=tmp_path / "bundle", max_length=MAX_LENGTH))


def test_a_bundle_ends_rows_as_its_checkpoint_does(zoo: Zoo) -> None:
    assert manifests.read(zoo.bundle("llama")).model.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("installed", "says"),
    [(True, "cannot be converted .*; put a tokenizer.json there$"), (False, "; `pip install sentencepiece protobuf`$")],
)
def test_a_tokenizer_that_cannot_be_converted_is_one_line_before_any_weights_are_read(
    installed: bool, says: str, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "find_spec", lambda name: object() if installed else None)
    folder = tmp_path / "model"
    zoo.model("llama").config.save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelNotSupportedError, match=says) as caught:
        export(ExportRequest(model=str(folder), out=tmp_path / "bundle"))
    assert "\n" not in str(caught.value)
    assert installed or "tiktoken" not in str(caught.value)
