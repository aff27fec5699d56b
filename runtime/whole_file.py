"""Writes a file as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
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
    else:
        replace_file(file, text.encode())


def replace_file(file: Path, content: bytes) -> None:
    """Put a new file in the place of one, if there is one, whose permissions it gets. Readers see either of them.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    partial = file.with_name(f".skipdecode-{secrets.token_hex(4)}")  # containers share process ids
    try:
        partial.write_bytes(content)
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(file, partial)
        partial.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
