"""How long a process spends inside engine calls; the rest of a step's time is the runtime's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class EngineTime:
    """Totals of all engine calls so far."""

    seconds: float = 0.0
    calls: int = 0


@contextmanager
def engine_time() -> Iterator[EngineTime]:
    """Count the calls of every engine that is bound inside the context."""
    from skipdecode.engines.ort import OrtEngine

    counted, bind = EngineTime(), OrtEngine.bind

    def timed_bind(engine: OrtEngine, *arrays: Any) -> Callable[[], None]:
        run = bind(engine, *arrays)

        def timed_run() -> None:
            started = time.perf_counter()
            run()
            counted.seconds += time.perf_counter() - started
            counted.calls += 1

        return timed_run

    OrtEngine.bind = timed_bind  # type: ignore[method-assign, assignment]
    try:
        yield counted
    finally:
        OrtEngine.bind = bind  # type: ignore[method-assign]
