"""Writes a file as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from pathlib import Path

# of a file that can be written but not replaced: one that is mounted by itself, as a container's volume; another user's in /tmp
_IRREPLACEABLE = (errno.EBUSY, errno.EPERM)


def write_whole(path: Path, text: str) -> None:
    """Write text, UTF-8, to a file. Where that fails, as on a full disk, the file stays as it was.

    A pipe or device is written in place, and so is a file that cannot be replaced.

    Raises:
        OSError: it cannot be written.
    """
    file = path.resolve()  # a link stays one. Of a pipe's /dev/fd/N or /dev/stdout it is a name that does not exist
    if (path.exists() and not path.is_file()) or not os.access(file.parent, os.W_OK):
        path.write_text(text, encoding="utf-8")
        return
    try:
        replace_file(file, text.encode())
    except OSError as error:
        if error.errno not in _IRREPLACEABLE:
            raise
        path.write_text(text, encoding="utf-8")


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
