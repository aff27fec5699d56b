"""The folder for files that are kept between runs but can be made again."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path


def cache_folder(purpose: str) -> Path:
    """The user's cache folder for `purpose`; it may not exist yet."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the system does not know the user, as in some containers
        caches = Path(_temporary_folder().name)
    return caches / "skipdecode" / purpose


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="skipdecode-")  # a folder of a fixed name could be another user's
