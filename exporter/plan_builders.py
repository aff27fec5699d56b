"""TensorRT's builders side by side, each in a process of its own, while the next plan's graph is still being made."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from skipdecode.control_group import free_memory
from skipdecode.cpu import usable_cores
from skipdecode.exporter.layout import Report, remove_lowered
from skipdecode.graph_passes.compile_tensorrt import PlanRequest, build_in_process

_BUILDER_BYTES = 400 << 20  # that a builder's process takes, and per byte of weights (403 MB: 1.46 GiB in all, seen):
_BUILDER_FACTOR = 3


def num_builders(target: str, most_weights: int) -> int:
    """How many at a time: one a core, as many as memory holds; `most_weights`: bytes of the largest plan's.

    Of `tensorrt` one alone: it chooses kernels by the time that they take on the GPU, which another builder's would change.
    """
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    left = free_memory()
    free = free if left is None else min(free, left)
    held = max(1, min(usable_cores(), free // (_BUILDER_BYTES + _BUILDER_FACTOR * most_weights)))
    return 1 if target == "tensorrt" else held


def build_plans(requests: Iterator[PlanRequest | None], total: int, at_a_time: int, report: Report) -> None:
    """Build what `requests` gives, whose graphs it has written by then; they are removed, and no more than one of them waits.

    Args:
        requests: None: a plan that is there already.
        total: of plans, for the progress.

    Raises:
        TargetError: a builder refused its graph; the others are ended.
    """
    running: dict[Future[None], PlanRequest] = {}
    stop, done = threading.Event(), 0

    def finish_one() -> None:
        nonlocal done
        report(f"building plan {done + 1} of {total} for {next(iter(running.values())).target}", done / total)
        future = next(iter(wait(running, return_when=FIRST_COMPLETED).done))
        request = running.pop(future)
        future.result()
        remove_lowered(Path(request.source))
        done += 1

    with ThreadPoolExecutor(at_a_time) as pool:
        try:
            for request in requests:
                if request is None:
                    done += 1
                    continue
                running[pool.submit(build_in_process, request, stop)] = request
                while len(running) > at_a_time:
                    finish_one()
            while running:
                finish_one()
        except BaseException:
            stop.set()
            for future in running:
                future.cancel()
            raise
