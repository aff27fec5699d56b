"""A run that was killed goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from skipdecode.errors import CapacityError
from skipdecode.validation.journal import Journal


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_was_measured_before_the_kill_is_not_measured_again() -> None:
    first = Journal({"bundle": "a"})
    assert first.once("x", lambda: {"ms": (1, 2)}) == {"ms": [1, 2]}
    again = Journal({"bundle": "a"})
    assert again.resumed == 1
    assert again.once("x", lambda: pytest.fail("measured again")) == {"ms": [1, 2]}


def test_another_identity_is_another_run() -> None:
    Journal({"bundle": "a"}).once("x", lambda: 1)
    other = Journal({"bundle": "b"})
    assert (other.resumed, other.once("x", lambda: 2)) == (0, 2)


def test_a_line_torn_by_the_kill_is_measured_again() -> None:
    journal = Journal({})
    journal.once("x", lambda: 1)
    with journal.path.open("a") as file:
        file.write('12\n["y", {"ms": 3')
    again = Journal({})
    assert again.resumed == 1
    assert again.once("y", lambda: 4) == 4
    assert Journal({}).once("y", lambda: 5) == 4


def test_a_finished_run_is_forgotten() -> None:
    journal = Journal({})
    journal.once("x", lambda: 1)
    journal.finish()
    assert Journal({}).resumed == 0


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CapacityError, match=r"cannot be written \(Not a directory\); let XDG_CACHE_HOME name"):
        Journal({})
