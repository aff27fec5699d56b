"""`--out`: a folder that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skipdecode import manifest
from skipdecode.errors import BundleError


def real_out(out: Path) -> Path:
    """The folder that `--out` names: of a link what it points to, of `.` the folder's own name, beside which files can be put."""
    return Path(os.path.realpath(out))


def check_out(out: Path, force: bool) -> None:
    """Refuse, before any work, a folder that would not be replaced.

    Raises:
        BundleError: it exists without `force`, or is something else than a bundle.
    """
    if out.exists() and not force:
        raise BundleError("exists already", "choose another --out, or replace it with --force", where=str(out))
    if out.exists() and not (out / manifest.MANIFEST).is_file() and not _is_empty_folder(out):
        raise BundleError("exists and is not a bundle, so --force does not replace it", "choose another --out", where=str(out))


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


@contextmanager
def fresh_folder(out: Path, force: bool) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when all went well, and vanishes when not.

    Raises:
        BundleError: it cannot be written, or something that `check_out` refuses has appeared at `out` meanwhile.
    """
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        check_out(out, force)  # an export takes minutes
        _replace(out, partial)
    except OSError as error:
        raise BundleError(
            f"cannot be written ({error.strerror or error})", "free space or choose another --out", where=str(out)
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(out: Path, partial: Path) -> None:
    old = out.with_name(f".{out.name}.old-{os.getpid()}")
    try:
        if out.exists():
            out.rename(old)
        partial.rename(out)
    finally:  # also where the user stops it
        if old.exists() and not out.exists():
            old.rename(out)
    shutil.rmtree(old, ignore_errors=True)
