"""A checkpoint's settings for generation: the ids that end a row, and settings that bundles do not apply."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.config_json import read_settings

logger = logging.getLogger(__name__)

_FILE_NAME = "generation_config.json"
# settings that change greedy tokens in transformers -> values that change none
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,), "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,), "bad_words_ids": (),
    "force_words_ids": (), "forced_bos_token_id": (), "forced_eos_token_id": (), "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],), "sequence_bias": (), "exponential_decay_length_penalty": (), "guidance_scale": (1,),
    "min_length": (0,), "min_new_tokens": (0,), "num_beams": (1,), "penalty_alpha": (0,), "stop_strings": (),
    "watermarking_config": (), "token_healing": (False,),
}  # fmt: skip


def end_ids(folder: Path | None, config: Any) -> tuple[int, ...]:
    """The ids that end a row. As in transformers, from generation_config.json, else config.json, else its text part.

    Args:
        config: used if there is no checkpoint (`folder` is None).

    Raises:
        ModelNotSupportedError: a file cannot be read, or an id is not a whole number.
    """
    if folder is None:
        setting, where = config.eos_token_id, Path("config.json")
    else:
        settings, where = _read_settings(folder)
        setting = settings.get("eos_token_id")
    ids = setting if isinstance(setting, list) else [] if setting is None else [setting]
    if any(type(id_) is not int for id_ in ids):  # not isinstance: true and false would be ints
        raise ModelNotSupportedError(f"eos_token_id is {setting!r}", "write a whole number or a list of them", where=str(where))
    return tuple(ids)


def warn_of_unapplied(folder: Path | None) -> None:
    """Warn of settings that transformers' `generate` applies by default and bundles leave out.

    Raises:
        ModelNotSupportedError: the file cannot be read.
    """
    if folder is None:
        return
    settings, where = _read_settings(folder)
    unapplied = [name for name, neutral in _NEUTRAL.items() if settings.get(name) is not None and settings[name] not in neutral]
    if unapplied:
        logger.warning("%s: bundles ignore %s, which transformers applies", where.name, ", ".join(unapplied))


def _read_settings(folder: Path) -> tuple[dict[str, Any], Path]:
    """Settings for generation and the file they come from: generation_config.json, else config.json or a part of it."""
    if (where := folder / _FILE_NAME).is_file():
        return read_settings(where), where
    config_json = read_settings(where := folder / "config.json")
    parts = [config_json[name] for name in ("decoder", "generator", "text_config") if isinstance(config_json.get(name), dict)]
    names = ("eos_token_id", *_NEUTRAL)
    settings = {name: next((part[name] for part in (config_json, *parts) if part.get(name) is not None), None) for name in names}
    return settings, where
