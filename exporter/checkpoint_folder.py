"""From what a user types to a checkpoint's folder, without torch and transformers: a mistyped name is reported at once."""

from __future__ import annotations

import re
from pathlib import Path

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.config_json import check_permitted
from skipdecode.text import is_utf8

_REMEDY = "name a checkpoint folder, a hub id or opt-SIZE"
_HUB_ID_PATTERN = r"[\w.-]+(/[\w.-]+)?"


def checkpoint_folder(model: str) -> Path | None:
    """The folder that `model` names; None: it is a hub id or a short OPT name.

    Raises:
        ModelNotSupportedError: `model` is none of these, its path is not UTF-8, its folder has no readable config.json, or it is
            an adapter.
    """
    if not model:  # Path("") is the current folder
        raise ModelNotSupportedError("is empty", _REMEDY, where="MODEL")
    folder = Path(model)
    if not is_utf8(folder):
        raise ModelNotSupportedError("is not UTF-8, the only encoding that safetensors takes", "rename the folder", where=model)
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            raise adapter_error(model)
        if not (folder / "config.json").is_file():
            raise missing_config_error(model)
        check_permitted(folder / "config.json")
        return folder
    if folder.exists() or model.startswith((".", "/", "~")) or not re.fullmatch(_HUB_ID_PATTERN, model):
        raise ModelNotSupportedError("is not a folder", _REMEDY, where=model)
    return None


def adapter_error(model: str) -> ModelNotSupportedError:
    """The error for a folder or hub id that holds a peft adapter, without the weights that it changes."""
    return ModelNotSupportedError(
        "holds an adapter (adapter_config.json), not the model it adapts",
        "merge them: `AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload().save_pretrained(NEW_DIR)`, "
        "and `AutoTokenizer.from_pretrained(DIR).save_pretrained(NEW_DIR)`",
        where=model,
    )


def missing_config_error(model: str) -> ModelNotSupportedError:
    """The error for a folder or hub id without a config.json."""
    remedy = "name a checkpoint that transformers can load (for GGUF files, the one they were made from)"
    return ModelNotSupportedError("holds no config.json", remedy, where=model)
