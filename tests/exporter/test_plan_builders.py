"""Which builders run side by side, and what happens to the graphs that they are given."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipdecode.errors import TargetError
from skipdecode.exporter import plan_builders
from skipdecode.exporter.plan_builders import build_plans, num_builders
from skipdecode.graph_passes.compile_tensorrt import PlanRequest

NAMES = [f"plan_{index}" for index in range(8)]


def _requests(folder: Path, names: list[str] = NAMES) -> Iterator[PlanRequest]:
    """Yield requests, writing each one's graph and weights when its turn comes."""
    for name in names:
        source = folder / f"{name}.onnx"
        source.touch()
        source.with_suffix(".bin").touch()
        yield PlanRequest(target="tensorrt-rtx", source=str(source), plan=str(folder / f"{name}.plan"), profiles=())


def _silent(what: str, done: float) -> None:
    pass


def test_as_many_builders_as_allowed_run_at_a_time_and_one_graph_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: set[str] = set()
    seen, graphs = [], []

    def build(request: PlanRequest, stop: threading.Event) -> None:
        running.add(request.source)
        time.sleep(0.1)
        seen.append(len(running))
        graphs.append(len(list(tmp_path.glob("*.onnx"))))
        running.remove(request.source)

    monkeypatch.setattr(plan_builders, "build_in_process", build)
    reported: list[str] = []
    build_plans(_requests(tmp_path), len(NAMES), 3, lambda what, done: reported.append(what))
    assert max(seen) == 3 and max(graphs) <= 4
    assert reported == [f"building plan {index} of 8 for tensorrt-rtx" for index in range(1, 9)]
    assert list(tmp_path.iterdir()) == [], "graphs are removed once they are built"


def test_a_slow_build_keeps_no_other_builder_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = threading.Semaphore(0)

    def build(request: PlanRequest, stop: threading.Event) -> None:
        if request.source.endswith("plan_0.onnx"):
            assert all(others.acquire(timeout=30) for _ in NAMES[1:]), "the others waited for it"
        else:
            others.release()

    monkeypatch.setattr(plan_builders, "build_in_process", build)
    build_plans(_requests(tmp_path), len(NAMES), 2, _silent)


def test_plans_that_exist_already_count_as_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_builders, "build_in_process", lambda request, stop: None)
    reported: list[str] = []
    build_plans(iter([None, *_requests(tmp_path, NAMES[:1]), None]), 3, 2, lambda what, done: reported.append(what))
    assert reported == ["building plan 3 of 3 for tensorrt-rtx"], "only the last one was waited for"


def test_a_graph_that_is_refused_ends_the_other_builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def build(request: PlanRequest, stop: threading.Event) -> None:
        if request.source.endswith("plan_0.onnx"):
            raise TargetError("refused")
        assert stop.wait(30), "it was never told to stop"
        ended.append(request.source)

    monkeypatch.setattr(plan_builders, "build_in_process", build)
    with pytest.raises(TargetError, match="refused"):
        build_plans(_requests(tmp_path), len(NAMES), 2, _silent)
    assert len(ended) <= 2


def test_a_graph_that_cannot_be_made_ends_the_builders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, stopped = threading.Event(), []

    def requests() -> Iterator[PlanRequest]:
        yield from _requests(tmp_path, NAMES[:2])
        assert begun.wait(30), "no builder has begun"
        raise OSError(28, "No space left on device")

    def build(request: PlanRequest, stop: threading.Event) -> None:
        begun.set()
        stopped.append(stop.wait(30))

    monkeypatch.setattr(plan_builders, "build_in_process", build)
    with pytest.raises(OSError, match="No space left"):
        build_plans(requests(), 3, 2, _silent)
    assert stopped and all(stopped)


def test_no_more_builders_run_than_there_are_cores_and_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_builders, "usable_cores", lambda: 2)
    assert num_builders("tensorrt-rtx", 1 << 20) == 2
    assert num_builders("tensorrt-rtx", 1 << 40) == 1
    assert num_builders("tensorrt", 1 << 20) == 1, "it times its kernels on the one GPU"


def test_no_more_builders_run_than_a_containers_memory_is_enough_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: 1.46 GiB for a builder whose plan has 403 MB of weights."""
    monkeypatch.setattr(plan_builders, "usable_cores", lambda: 8)
    monkeypatch.setattr(plan_builders, "free_memory", lambda: 1500 << 20)
    assert num_builders("tensorrt-rtx", 100 << 20) == 2
