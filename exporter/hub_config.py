"""Fetch a hub id's settings without torch or transformers, so that a refusal is reported before they are imported."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from tqdm import tqdm

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.checkpoint_folder import ADAPTER_CONFIG, CONFIG, missing_config_error
from skipdecode.exporter.hub_errors import explain


class _NoBar(tqdm):  # type: ignore[misc]
    """Draws nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "disable": True})


@functools.cache  # several readers ask for the same settings
def fetch_config(model: str) -> Path:
    """Download a hub id's config.json and, if it is an adapter, adapter_config.json into huggingface_hub's cache.

    Returns:
        The folder that holds them.

    Raises:
        ModelNotSupportedError: the hub cannot be reached or has no such model, or the model has neither file.
    """
    try:
        folder = Path(snapshot_download(model, allow_patterns=[CONFIG, ADAPTER_CONFIG], tqdm_class=_NoBar))
    except (OSError, ValueError) as error:
        what, remedy = explain(error)
        raise ModelNotSupportedError(what, remedy, where=model) from error
    if not any((folder / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        raise missing_config_error(model)
    return folder
