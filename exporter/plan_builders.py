"""Run TensorRT's builders side by side, each in its own process, while the next plan's graph is being made."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from skipdecode.control_group import free_memory
from skipdecode.cpu import usable_cores
from skipdecode.exporter.layout import Report, remove_lowered
from skipdecode.graph_passes.compile_tensorrt import PlanRequest, build_in_process

_BUILDER_BYTES = 400 << 20  # memory of a builder's process ..
_BUILDER_FACTOR = 3  # .. plus this much per byte of weights (measured with 403 MB: 1.46 GiB in all)


def num_builders(target: str, max_weight_bytes: int) -> int:
    """How many builders to run at a time: at most one per core, and no more than fit in memory.

    `tensorrt` gets only one: it chooses kernels by timing them on the GPU, which another builder's kernels would disturb.

    Args:
        max_weight_bytes: weight bytes of the largest plan.
    """
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    group_free = free_memory()
    free = free if group_free is None else min(free, group_free)
    fitting = max(1, min(usable_cores(), free // (_BUILDER_BYTES + _BUILDER_FACTOR * max_weight_bytes)))
    return 1 if target == "tensorrt" else fitting


def build_plans(requests: Iterator[PlanRequest | None], total: int, max_running: int, report: Report) -> None:
    """Build the plans of `requests`, and remove each one's graph once it is built. At most one graph waits for a free builder.

    Args:
        requests: each with its graph already written; None: a plan that exists already.
        total: number of plans, for the progress.

    Raises:
        TargetError: a builder refused its graph; the other builders are stopped.
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

    with ThreadPoolExecutor(max_running) as pool:
        try:
            for request in requests:
                if request is None:
                    done += 1
                    continue
                running[pool.submit(build_in_process, request, stop)] = request
                while len(running) > max_running:
                    finish_one()
            while running:
                finish_one()
        except BaseException:
            stop.set()
            for future in running:
                future.cancel()
            raise
