"""Writes a file as a whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write text, UTF-8, to a file. Where that fails, as on a full disk, the file stays as it was.

    A pipe or device is written in place, and so is a file in a folder that takes no others.

    Raises:
        OSError: it cannot be written.
    """
    file = path.resolve()  # a link stays one
    if (file.exists() and not file.is_file()) or not os.access(file.parent, os.W_OK):
        file.write_text(text, encoding="utf-8")
        return
    partial = file.with_name(f".skipdecode-{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        if file.exists():
            shutil.copymode(file, partial)
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
