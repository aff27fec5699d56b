"""The ids that end a row, and settings that bundles leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from skipdecode import manifest as manifests
from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter import command
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.generation_config import end_ids
from tests.models import CONFIGS, MAX_LENGTH
from tests.zoo import Zoo


def _of_a_vision_model(**whole: Any) -> dict[str, Any]:
    text = {**CONFIGS["gemma3"]().to_dict(), "eos_token_id": 1}
    return {"model_type": "gemma3", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}, **whole}


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config": {"eos_token_id": [1, 106]}, "config": {"eos_token_id": 1}}, (1, 106)),
        ({"generation_config": {}, "config": {"eos_token_id": 1}}, ()),
        ({"config": {"eos_token_id": 5}}, (5,)),
        ({"config": {}}, ()),
        ({"config": _of_a_vision_model(eos_token_id=[1, 106])}, (1, 106)),
        ({"config": _of_a_vision_model()}, (1,)),
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
        ("[" * 100_000, "generation_config.json: is not JSON .maximum recursion depth"),
        ('{"eos_token_id": "2"}', "eos_token_id is '2'; write a whole number"),
        ('{"eos_token_id": [2, null]}', "eos_token_id is .2, None.; write a whole number"),
        ('{"eos_token_id": true}', "eos_token_id is True; write a whole number"),
    ],
)
def test_an_unreadable_generation_config_gives_one_line_before_anything_is_compiled(
    content: str, says: str, zoo: Zoo, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    zoo.model("llama").save_pretrained(folder)
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ModelNotSupportedError, match=says) as caught:
        export(ExportRequest(model=str(folder), out=tmp_path / "outs" / "bundle", max_length=MAX_LENGTH))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "outs").exists()


def test_a_bundle_ends_rows_as_its_checkpoint_does(zoo: Zoo) -> None:
    assert manifests.read(zoo.bundle("llama")).model.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("file", "settings", "named"),
    [
        (
            "generation_config",
            {"repetition_penalty": 1.05, "suppress_tokens": [16], "min_length": 5},
            "repetition_penalty, suppress_tokens, min_length",
        ),
        ("generation_config", {"repetition_penalty": 1.0, "suppress_tokens": [], "num_beams": 1, "temperature": 0.6}, None),
        ("config", {"repetition_penalty": 1.3}, "repetition_penalty"),
    ],
)
def test_settings_that_transformers_applies_by_itself_and_a_bundle_does_not_are_warned_of(
    file: str, settings: dict[str, Any], named: str | None, zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    zoo.model("llama").save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    own = json.loads((folder / "config.json").read_text()) if file == "config" else {}
    (folder / f"{file}.json").write_text(json.dumps({**own, **settings}))
    assert command.main([str(folder), "--max-length", str(MAX_LENGTH), "--out", str(tmp_path / "bundle")]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "which transformers applies" in line]
    wanted = f"skip-export: warning: {file}.json: bundles ignore {named}, which transformers applies"
    assert warnings == ([wanted] if named else [])
