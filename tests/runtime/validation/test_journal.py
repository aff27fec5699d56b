"""A run that was killed is resumed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skipdecode.errors import CapacityError
from skipdecode.validation.journal import Journal


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_measurements_from_before_the_kill_are_not_repeated() -> None:
    first = Journal({"bundle": "a"})
    assert first.once("x", lambda: {"ms": (1, 2)}) == {"ms": [1, 2]}
    assert first.once("x", lambda: pytest.fail("measured again")) == {"ms": [1, 2]}
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


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line.replace("1.5", "7.5"),
        lambda line: line.replace("1.5", '"x"'),
        lambda line: line.replace('"ms"', '"mt"'),
        lambda line: line.replace('"x"', '"y"'),
        lambda line: line.replace("1.5", "\udcff"),  # not UTF-8
        lambda line: '["x", "x"]',
        lambda line: '["x", {"ms": 1.5}]',  # without a checksum
        lambda line: '["x", {"ms": 1.5}, null]',
        lambda line: '{"x": 1, "y": 2, "z": 3}',
        lambda line: "[" * 100_000,
    ],
)
def test_a_damaged_line_is_measured_again(damage: Callable[[str], str]) -> None:
    journal = Journal({})
    journal.once("x", lambda: {"ms": 1.5})
    line = journal.path.read_text().strip()
    assert damage(line) != line
    journal.path.write_text(f"\n{damage(line)}\n", errors="surrogateescape")
    again = Journal({})
    assert (again.resumed, again.once("x", lambda: 2), again.once("y", lambda: 3)) == (0, 2, 3)
    assert Journal({}).resumed == 2


@pytest.mark.parametrize("value", [math.inf, {"é\ud800": -0.0}, {1: [None, True]}, [0.1, 1e-300, 2**70], "NaN", []])
def test_any_measurement_is_read_back(value: Any) -> None:
    as_measured = Journal({}).once("naïve", lambda: value)
    assert Journal({}).once("naïve", lambda: pytest.fail("measured again")) == as_measured


def test_a_finished_run_is_forgotten() -> None:
    journal = Journal({})
    journal.once("x", lambda: 1)
    journal.finish()
    assert Journal({}).resumed == 0
    for ended in (journal, journal):  # another validation with the same settings may have ended meanwhile
        ended.finish()


def test_a_folder_that_cannot_be_written_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CapacityError, match=r"cannot be written \(Not a directory\); free space there, or set XDG_CACHE_HOME to"):
        Journal({})


def test_a_measurement_that_cannot_be_stored_is_reported_in_one_line() -> None:
    journal = Journal({"disk": "full"})
    journal.path.unlink()
    journal.path.symlink_to("/dev/full")
    with pytest.raises(CapacityError, match=r"/validate: cannot be written \(No space left on device\); free space there"):
        journal.once("cell", lambda: 1)
    journal.finish()
