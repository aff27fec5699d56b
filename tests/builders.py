"""TensorRT's builders in the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from skipdecode.graph_passes.compile_tensorrt import PlanRequest, build_plan

_BUILDER = threading.Lock()


def _build_here(request: PlanRequest, stop: threading.Event) -> None:
    """Do what `build_in_process` does, but in this process: each new one would load TensorRT again for a tiny plan."""
    with _BUILDER:  # polygraphy's settings are the process's
        if not stop.is_set():
            build_plan(request)


@contextmanager
def building_here() -> Iterator[None]:
    """Build TensorRT's plans in this process, one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skipdecode.exporter.plan_builders.build_in_process", _build_here)
        yield
