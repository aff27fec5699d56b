"""What `skip-validate` prints."""

from __future__ import annotations

from typing import Any

import pytest

from skipdecode.validation.terminal import show

NAME = "a[/b] [bold]x[/bold] :smile:"  # a folder's


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = {"name": "table", "layers": [3, 2], "speedup": 1.2}
    bundle = {"model": {"name": NAME, "layers": 3}, "schedule": schedule, "variants": []}
    row = {"name": NAME, "old_ms": 1.0, "new_ms": 2.0, "ratio": 2.0, "verdict": "slower"}
    result: dict[str, Any] = {
        "bundle": bundle, "machine": {"cpu": "one", "cores": 2, "memory_gib": 4, "gpu": None}, "slo": [], "holds": True,
        "integrity": {"holds": True, "files": 5}, "targets": [{"name": "cuda", "runs": False, "why": NAME}],
        "baseline": {"differs": [f"model: {NAME}, now c"], "rows": [row]},
    }  # fmt: skip
    show(result)
    assert capsys.readouterr().out.count(NAME) == 4
