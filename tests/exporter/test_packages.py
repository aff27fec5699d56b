"""Packages that exporting needs but that are missing or too old: one line, before anything is imported."""

from __future__ import annotations

from importlib import metadata

import pytest

from skipdecode.errors import TargetError
from skipdecode.exporter import command
from skipdecode.exporter.packages import check_packages

_VERSION = metadata.version


def _have(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Let these packages have these versions, or, with None, be missing."""

    def version(name: str) -> str:
        found = versions.get(name, "") if name in versions else _VERSION(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)


def test_the_packages_installed_here_suffice() -> None:
    check_packages()


def test_all_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, torch=None, onnx=None)
    with pytest.raises(TargetError, match=r"^exporting needs torch, onnx; pip install 'skipdecode\[export\]'$"):
        check_packages()


@pytest.mark.parametrize(("version", "enough"), [("5.9", False), ("5.23.1", False), ("5.24.0", True), ("5.100.0.dev0", True)])
def test_versions_are_compared_by_their_numbers(version: str, enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, transformers=version)
    if enough:
        check_packages()
        return
    with pytest.raises(TargetError) as raised:
        check_packages()
    assert str(raised.value) == (f"transformers {version} is older than 5.24; pip install --upgrade 'skipdecode[export]'")


def test_nothing_is_checked_where_skipdecode_itself_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    _have(monkeypatch, torch=None)
    check_packages()


def test_the_command_reports_it_in_one_line_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _have(monkeypatch, transformers="4.57.1")
    assert command.main(["opt-125m", "--random-weights", "--out", "nowhere"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
