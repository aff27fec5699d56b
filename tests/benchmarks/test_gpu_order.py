"""In which order gpu.py measures, and that a system that fails costs no other's figures."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def gpu_order(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    yield importlib.import_module("gpu_order")
    for name in ("gpu_order", "gpu_figures", "summary", "systems", "worker"):
        sys.modules.pop(name, None)


class _Worker:
    """Fails at more than one row; afterwards, as a process that has ended, always."""

    def __init__(self, works: bool) -> None:
        self._works, self._ended = works, False

    def call(self, method: str, batch: int, context: int) -> dict[str, Any]:
        self._ended |= not self._works and batch > 1
        if self._ended:
            raise RuntimeError("a worker failed:\nTraceback\n  line\ntorch.OutOfMemoryError: CUDA out of memory\n  a hint")
        return {"ms": 1.0}

    def close(self) -> None:
        self._ended = True


def _broken() -> _Worker:
    raise RuntimeError("a worker failed:\nskipdecode.errors.TargetError: no provider")


def test_one_row_comes_first_and_each_other_system_joins_the_first_one_alone(gpu_order: Any) -> None:
    systems = ["cuda", "peer", "at 8"]
    found = gpu_order.stages(["8x128", "1x128", "1x9"], systems, lambda name, point: name != "at 8" or point == "8x128")
    assert [(stage.point, *stage.systems) for stage in found] == [
        ("1x128", "cuda"), ("1x9", "cuda"), ("1x128", "cuda", "peer"), ("1x9", "cuda", "peer"), ("8x128", "cuda", "peer", "at 8"),
    ]  # fmt: skip


def test_what_fails_is_told_and_starts_anew_at_the_next_point(gpu_order: Any) -> None:
    told: dict[str, str] = {}
    makers = {"good": lambda: _Worker(True), "large": lambda: _Worker(False), "broken": _broken}
    processes = gpu_order.Processes("model", makers, told, time.monotonic() + 60)
    everyone, counts = tuple(makers), []
    for batch in (1, 8, 1):
        found = processes.take_turns(gpu_order.Stage(batch=batch, context=128, systems=everyone), 2)
        counts.append({system: len(cells) for system, cells in found.items()})
    assert counts == [{"good": 2, "large": 2}, {"good": 2}, {"good": 2, "large": 2}]
    assert told == {
        "model, broken, 1x128": "skipdecode.errors.TargetError: no provider",
        "model, broken, 8x128": "skipdecode.errors.TargetError: no provider",
        "model, large, 8x128": "torch.OutOfMemoryError: CUDA out of memory",
    }
