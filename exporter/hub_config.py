"""A hub id's config.json, asked for without torch and transformers: what the hub refuses is told before they are imported."""

from __future__ import annotations

import functools

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.checkpoint_folder import adapter_error, missing_config_error
from skipdecode.exporter.hub_errors import explain


@functools.cache  # a hub that cannot be reached is asked for half a minute before what was downloaded once is taken
def fetch_config(model: str) -> None:
    """Let huggingface_hub keep a hub id's config.json in its cache.

    Raises:
        ModelNotSupportedError: the hub cannot be reached or has no such model, or this has no config.json.
    """
    try:
        hf_hub_download(model, "config.json")
    except LocalEntryNotFoundError as error:  # nobody was there to ask
        raise _unread(model, error) from error
    except EntryNotFoundError as error:
        raise (adapter_error(model) if _has_adapter(model) else missing_config_error(model)) from error
    except (OSError, ValueError) as error:
        raise _unread(model, error) from error


def _unread(model: str, error: Exception) -> ModelNotSupportedError:
    what, remedy = explain(error)
    return ModelNotSupportedError(what, remedy, where=model)


def _has_adapter(model: str) -> bool:
    try:
        hf_hub_download(model, "adapter_config.json")
    except EntryNotFoundError:
        return False
    return True
