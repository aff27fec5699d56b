"""What `skip-validate` prints."""

from __future__ import annotations

import re
from typing import Any

import pytest

from skipdecode.validation.terminal import show

NAME = "a[/b] [bold]x[/bold] :smile:"  # a folder may have such a name


def _result() -> dict[str, Any]:
    """The result of a bundle whose only target does not run and that differs from its baseline."""
    schedule = {"name": "table", "layers": [3, 2], "speedup": 1.2}
    bundle = {"model": {"name": NAME, "layers": 3}, "schedule": schedule, "variants": []}
    row = {"name": NAME, "old_ms": 1.0, "new_ms": 2.0, "ratio": 2.0, "verdict": "slower"}
    return {
        "bundle": bundle, "machine": {"cpu": "one", "cores": 2, "memory_gib": 4, "gpu": None}, "slo": [], "holds": True,
        "resumed": 0,
        "integrity": {"holds": True, "files": 5}, "targets": [{"name": "cuda", "runs": False, "why": NAME}],
        "baseline": {"differs": [f"model: {NAME}, now c"], "rows": [row]},
    }  # fmt: skip


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show(_result())
    assert capsys.readouterr().out.count(NAME) == 4


def test_control_codes_in_names_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    result = _result()
    result["bundle"]["model"]["name"] = result["targets"][0]["why"] = "a\x1b[2Jb"
    show(result)
    printed = capsys.readouterr().out
    assert (printed.count(r"a\x1b[2Jb"), printed.count("\x1b")) == (2, 0)


@pytest.mark.parametrize("environment", [{}, {"COLUMNS": "40"}, {"FORCE_COLOR": "1", "TERM": "dumb"}])
def test_no_line_is_broken_where_the_output_is_not_a_terminal(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result, long = _result(), "/a" * 500
    result["targets"][0]["why"] = f"{long} why"
    result["baseline"] = {
        "differs": [f"model: {long}, now c"],
        "rows": [{**result["baseline"]["rows"][0], "name": f"{long} row"}],
    }
    result["slo"] = [{"slo": f"{long}<=30", "target": "cpu", "measured": "1.0", "holds": False}]
    show(result)
    lines = capsys.readouterr().out.splitlines()
    for phrases in (
        (NAME, "schedule table 3 -> 2 over 2 positions", "0 variants; 5 files match the manifest"),
        ("target cuda does not run here", f"{long} why"),
        (f"DIFFERS: model: {long}, now c",),
        (f"{long} row", "1.00", "2.00", "slower"),
        (f"{long}<=30", "cpu", "DOES NOT HOLD"),
    ):
        assert any(all(phrase in line for phrase in phrases) for line in lines), phrases


def test_on_a_terminal_lines_are_as_long_as_the_terminal_is_wide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")  # in a dumb one, rich takes 80 columns
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show(_result())
    text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert max(map(len, text.splitlines())) == 40
