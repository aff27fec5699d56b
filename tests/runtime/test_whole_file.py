"""A file is written as a whole or not at all."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skipdecode.whole_file import write_whole


@contextmanager
def _files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("before", [None, "a page"])
def test_a_file_that_does_not_fit_leaves_what_was_there(before: str | None, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    if before is not None:
        path.write_text(before)
    with _files_of_at_most(8192), pytest.raises(OSError, match="File too large"):
        write_whole(path, "ü" * 8192)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == ({} if before is None else {"report.html": before})


def test_a_new_file_has_the_permissions_of_any_and_one_that_is_replaced_keeps_its_own(tmp_path: Path) -> None:
    path, any_file = tmp_path / "new", tmp_path / "any"
    any_file.touch()
    write_whole(path, "ü")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(any_file.stat().st_mode)
    path.chmod(0o604)
    write_whole(path, "ä")
    assert (path.read_text("utf-8"), stat.S_IMODE(path.stat().st_mode)) == ("ä", 0o604)


def test_a_link_stays_a_link_and_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, file = tmp_path / "link", tmp_path / "elsewhere" / "file"
    link.symlink_to(file)
    for text in ("new", "replaced"):
        write_whole(link, text)
        assert link.is_symlink() and file.read_text() == text
    assert [path.name for path in file.parent.iterdir()] == ["file"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert os.read(reader, 9) == b"text" and pipe.is_fifo()
    os.close(reader)


def test_a_pipe_is_written_to_by_the_name_that_a_shell_gives_it() -> None:
    reader, writer = os.pipe()
    write_whole(Path(f"/dev/fd/{writer}"), "text")  # --report >(gzip > report.html.gz); /dev/stdout is such a name, too
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EPERM])
def test_a_file_that_is_mounted_or_in_a_shared_folder_is_written_in_place(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    monkeypatch.setattr(Path, "replace", refuse)
    (path := tmp_path / "file").write_text("what was there before")
    write_whole(path, "after")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "after")]


def test_a_file_in_a_folder_that_takes_no_others_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "file").write_text("before")
    monkeypatch.setattr(os, "access", lambda where, mode: where != tmp_path)
    inode = path.stat().st_ino
    write_whole(path, "after")
    assert (path.read_text(), path.stat().st_ino) == ("after", inode)
