"""The order in which gpu.py measures, and that a failing system does not cost the others their figures."""

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
    """Unless it `works`, fails at more than one row, and from then on always, as a process that has ended."""

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


def test_points_of_one_row_come_first_and_the_other_systems_join_the_first_one_by_one(gpu_order: Any) -> None:
    systems = ["cuda", "peer", "at 8"]
    stages = gpu_order.stages(["8x128", "1x128", "1x9"], systems, lambda name, point: name != "at 8" or point == "8x128")
    assert [(stage.point, *stage.systems) for stage in stages] == [
        ("1x128", "cuda"), ("1x9", "cuda"), ("1x128", "cuda", "peer"), ("1x9", "cuda", "peer"), ("8x128", "cuda", "peer", "at 8"),
    ]  # fmt: skip


def test_a_failing_system_is_reported_and_started_again_at_the_next_point(gpu_order: Any) -> None:
    not_measured: dict[str, str] = {}
    makers = {"good": lambda: _Worker(True), "large": lambda: _Worker(False), "broken": _broken}
    processes = gpu_order.Processes("model", makers, not_measured, time.monotonic() + 60)
    everyone, counts = tuple(makers), []
    for batch in (1, 8, 1):
        turns = processes.take_turns(gpu_order.Stage(batch=batch, context=128, systems=everyone), 2)
        counts.append({system: len(cells) for system, cells in turns.items()})
    assert counts == [{"good": 2, "large": 2}, {"good": 2}, {"good": 2, "large": 2}]
    assert not_measured == {
        "model, broken, 1x128": "skipdecode.errors.TargetError: no provider",
        "model, broken, 8x128": "skipdecode.errors.TargetError: no provider",
        "model, large, 8x128": "torch.OutOfMemoryError: CUDA out of memory",
    }
