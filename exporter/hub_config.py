"""Fetch a hub id's config.json without torch or transformers, so that a refusal is reported before they are imported."""

from __future__ import annotations

import functools

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.checkpoint_folder import adapter_error, missing_config_error
from skipdecode.exporter.hub_errors import explain


@functools.cache  # when the hub is unreachable, each call retries for half a minute before it falls back to an earlier download
def fetch_config(model: str) -> None:
    """Download a hub id's config.json into huggingface_hub's cache.

    Raises:
        ModelNotSupportedError: the hub cannot be reached or has no such model, or the model has no config.json.
    """
    try:
        hf_hub_download(model, "config.json")
    except LocalEntryNotFoundError as error:  # the hub was not reached; a subclass of EntryNotFoundError
        raise _fetch_error(model, error) from error
    except EntryNotFoundError as error:
        raise (adapter_error(model) if _has_adapter(model) else missing_config_error(model)) from error
    except (OSError, ValueError) as error:
        raise _fetch_error(model, error) from error


def _fetch_error(model: str, error: Exception) -> ModelNotSupportedError:
    what, remedy = explain(error)
    return ModelNotSupportedError(what, remedy, where=model)


def _has_adapter(model: str) -> bool:
    try:
        hf_hub_download(model, "adapter_config.json")
    except EntryNotFoundError:
        return False
    return True
