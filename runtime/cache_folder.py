"""Where what can be made again is kept between runs."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path


def cache_folder(purpose: str) -> Path:
    """The user's cache folder for this purpose; it may not be there yet."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user that the system does not know, as a container's may be
        caches = Path(_of_this_process().name)
    return caches / "skipdecode" / purpose


@functools.cache
def _of_this_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="skipdecode-")  # one with a known name could be another user's
