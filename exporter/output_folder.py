"""`--out`: a folder that appears complete or not at all."""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from skipdecode import manifest
from skipdecode.errors import BundleError
from skipdecode.exporter.signals import uninterrupted

# Raised by writes to an open file, so the error names no file: the disk is full or read-only, or the file too large for it.
_WRITE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
_NUMPY_SHORT_WRITE = re.compile(r"(\d+) requested and (\d+) written")  # numpy's message when the disk fills up; it has no errno

# Folders next to `--out`: an unfinished or half-removed bundle; the whole old bundle, put aside for the moment of replacement.
_PARTIAL, _REPLACED = "partial", "replaced"
_SECONDS_TO_LOCK = 10  # longer than an export takes from creating its folder to locking it

logger = logging.getLogger(__name__)


def real_out(out: Path) -> Path:
    """The folder that `--out` names, with links and `.` resolved, so that other folders can be put next to it."""
    return Path(os.path.realpath(out))


def check_out(out: Path, force: bool) -> None:
    """Refuse, before any work, an `out` that cannot be made, and an existing one that may not be replaced.

    Raises:
        BundleError: it exists and `force` is not set, it is not a bundle, or something is mounted there, as a container's volume;
            or the folder in which it is to be takes no other.
    """
    if os.path.exists(out):  # where a folder may not be entered, Path's raises
        _check_old(out, force)
    folder = next(parent for parent in out.parents if os.path.exists(parent))  # `/` does
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        reason = "which takes no new folder" if folder.is_dir() else "which is a file"
        raise BundleError(f"cannot be made in {folder}, {reason}", "check permissions, or choose another --out", where=str(out))


def _check_old(out: Path, force: bool) -> None:
    if not _is_bundle(out) and not _is_empty_folder(out):
        raise BundleError("exists and is not a bundle, so it is not replaced", "choose another --out", where=str(out))
    if os.path.ismount(out):  # it cannot be renamed, and a folder next to it lies on another file system
        raise BundleError("is a mount point, which cannot be replaced", "name a folder in it", where=str(out))
    if not force:
        raise BundleError("exists already", "choose another --out, or replace it with --force", where=str(out))


def check_outside(out: Path, path: Path, name: str) -> None:
    """Raises BundleError if `path`, which the export reads, lies in the folder that it replaces and would be deleted with it."""
    if real_out(path).is_relative_to(out):
        raise BundleError(f"holds {path}, which the export reads", f"move {name}, or choose another --out", where=str(out))


def _is_bundle(path: Path) -> bool:
    """Whether the folder holds a manifest of any format version; other programs may write a `bundle.json` of their own."""
    try:
        content = json.loads((path / manifest.MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "format_version" in content


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


@contextmanager
def fresh_folder(out: Path, force: bool) -> Iterator[Path]:
    """Yield a folder next to `out` that replaces `out` on success and is removed on failure.

    Raises:
        BundleError: the folder cannot be written, or something that `check_out` refuses has meanwhile appeared at `out`.
        OSError: an error inside the block that has nothing to do with the folder.
    """
    partial = _sibling_path(out, _PARTIAL)
    try:
        _make_partial(partial, out, force)
        with _locking(partial):
            yield partial
            check_out(out, force)  # again: an export takes minutes
            _replace(out, partial)
    except OSError as error:
        if not _is_about((partial, out), error):
            raise
        raise _unwritable_error(out, error) from error
    finally:
        with uninterrupted():
            shutil.rmtree(partial, ignore_errors=True)


def _make_partial(partial: Path, out: Path, force: bool) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        check_out(out, force)  # `_remove_leftovers` may have put the old bundle back
        partial.mkdir()
    except OSError as error:
        raise _unwritable_error(out, error) from error


def _remove_leftovers(out: Path) -> None:
    """Remove folders left by killed exports to `out`, tens of GB each; if `out` is missing, put the old bundle back first."""
    for kind in (_REPLACED, _PARTIAL):
        for folder in out.parent.glob(f".{glob.escape(out.name)}.{kind}-{8 * '[0-9a-f]'}"):
            try:
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:  # gone meanwhile, or not a folder of ours
                continue
            try:
                if time.time() - os.fstat(lock).st_mtime <= _SECONDS_TO_LOCK or not _try_lock(lock):
                    continue  # an export is running in it
                if kind == _REPLACED and not out.exists():
                    folder.rename(out)
                    logger.warning("restored %s, which a killed export had moved aside", out)
                else:
                    shutil.rmtree(folder, ignore_errors=True)
                    logger.warning("removed %s, left behind by an export that was killed", folder)
            finally:
                os.close(lock)


@contextmanager
def _locking(folder: Path) -> Iterator[None]:
    """Inside, lock the folder, also across renames and until this process dies, so that `_remove_leftovers` leaves it alone."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        _try_lock(lock)
        yield
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process holds it, or the file system has no locks
        return False
    return True


def _sibling_path(out: Path, what: str) -> Path:
    """A name that no other process picks. Process ids would not do: containers that share a volume may have the same ones."""
    return out.with_name(f".{out.name}.{what}-{secrets.token_hex(4)}")


def _is_about(folders: Iterable[Path], error: OSError) -> bool:
    """Whether an error is about a file in one of the folders, or names no file and is one that writing raises."""
    if error.filename is None:
        return error.errno in _WRITE_ERRNOS or bool(_NUMPY_SHORT_WRITE.fullmatch(str(error)))
    names = [name for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    files = [Path(os.fsdecode(name)).absolute() for name in names]
    return any(file.is_relative_to(folder.absolute()) for file in files for folder in folders)


def _unwritable_error(out: Path, error: OSError) -> BundleError:
    reason = error.strerror or _NUMPY_SHORT_WRITE.sub(r"\2 of \1 numbers were written", str(error))
    return BundleError(f"cannot be written ({reason})", "free space or choose another --out", where=str(out))


def _replace(out: Path, partial: Path) -> None:
    old, discarded = _sibling_path(out, _REPLACED), _sibling_path(out, _PARTIAL)
    with uninterrupted(), _locking(out) if out.exists() else nullcontext():
        try:
            if out.exists():
                out.rename(old)
            partial.rename(out)
        finally:
            if old.exists() and not out.exists():
                old.rename(out)
            elif old.exists():
                old.rename(discarded)  # so that a folder named `replaced` is whole even if this process is killed
                shutil.rmtree(discarded, ignore_errors=True)
