"""Explain why a model could not be fetched from the hub, and what to do about it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from skipdecode.exporter.config_json import reason

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # raised by writes to an open file, so the error names no file
_LOG_IN = "log in (`hf auth login`)"


def explain(error: Exception) -> tuple[str, str]:
    """Turn what transformers or huggingface_hub raised for a hub id into a ModelNotSupportedError's fact and remedy."""
    causes = list(_causes(error))

    def caused_by(kind: type[Exception]) -> bool:
        return any(isinstance(cause, kind) for cause in causes)

    if caused_by(GatedRepoError):
        return "is a gated model that you have no access to", f"request access on its page on the hub, and {_LOG_IN}"
    if caused_by(RepositoryNotFoundError):
        return (
            "is neither a folder nor a model on the hub that you can access",
            f"check the name; if the model is private, {_LOG_IN}",
        )
    if constants.HF_HUB_OFFLINE:
        what = "is neither a folder nor, with its weights, in huggingface_hub's cache"
        return what, "name a checkpoint folder, or unset HF_HUB_OFFLINE"
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno and (cause.filename or cause.errno in _NO_ROOM):
            file = f": {cause.filename}" if cause.filename else ""
            what = f"cannot be saved in huggingface_hub's cache ({os.strerror(cause.errno)}{file})"
            return what, "set HF_HOME to a writable folder with room for it"
    return f"is not a folder, and cannot be read from the hub ({reason(error)})", "name a checkpoint folder, or check the network"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
