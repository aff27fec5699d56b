"""From what a user types to a checkpoint's folder, without torch and transformers: a mistyped name is reported at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.config_json import check_permitted
from skipdecode.text import is_utf8

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"  # of a checkpoint; of a peft adapter, which may hold both
OLDER_TOKENIZERS = ("vocab.json", "tokenizer.model", "spiece.model")  # a folder with one of them has a tokenizer, too
_REMEDY = "name a checkpoint folder, a hub id or opt-SIZE"
_HUB_ID_PATTERN = r"[\w.-]+(/[\w.-]+)?"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a model's files lie."""

    folder: Path  # of its settings and weights
    adapter: Path | None = None  # of a peft adapter that changes these weights

    @property
    def tokenizer_folder(self) -> Path:
        """Where its tokenizer lies. An adapter may have its own, with more tokens or another chat template."""
        names = ("tokenizer.json", *OLDER_TOKENIZERS)
        if self.adapter is not None and any((self.adapter / name).exists() for name in names):
            return self.adapter
        return self.folder


def checkpoint_folder(model: str) -> Path | None:
    """The folder that `model` names, of a checkpoint or of an adapter; None: it is a hub id or a short OPT name.

    Raises:
        ModelNotSupportedError: `model` is none of these, its path is not UTF-8, or its folder has no readable settings.
    """
    if not model:  # Path("") is the current folder
        raise ModelNotSupportedError("is empty", _REMEDY, where="MODEL")
    folder = Path(model)
    if not is_utf8(folder):
        raise ModelNotSupportedError("is not UTF-8, the only encoding that safetensors takes", "rename the folder", where=model)
    if folder.is_dir():
        settings = next((folder / name for name in (ADAPTER_CONFIG, CONFIG) if (folder / name).is_file()), None)
        if settings is None:
            raise missing_config_error(model)
        check_permitted(settings)
        return folder
    if folder.exists() or model.startswith((".", "/", "~")) or not re.fullmatch(_HUB_ID_PATTERN, model):
        raise ModelNotSupportedError("is not a folder", _REMEDY, where=model)
    return None


def missing_config_error(model: str) -> ModelNotSupportedError:
    """The error for a folder or hub id without a config.json."""
    remedy = "name a checkpoint that transformers can load (for GGUF files, the one they were made from)"
    return ModelNotSupportedError("holds no config.json", remedy, where=model)
