"""What the figures were measured on: CPU, versions, and the read bandwidth that bounds a decode step."""

from __future__ import annotations

import os
import platform
import re
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

_LIBRARIES = ("skipdecode", "onnxruntime", "torch", "transformers", "ctranslate2", "numpy")


def facts() -> dict[str, Any]:
    """CPU model, cores this process may use, memory, versions."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    return {
        "cpu": models[0].strip() if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in _LIBRARIES},
    }


def slug(machine: dict[str, Any]) -> str:
    """A file name's part: amd-epyc-2-cores."""
    return re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['cores']} cores".lower()).strip("-")


class ReadBandwidth:
    """Reads of an array far larger than the last-level cache, by as many threads as the systems get."""

    def __init__(self, threads: int, mib: int = 512) -> None:
        self._parts = np.array_split(np.ones(mib << 18, dtype=np.float32), threads)
        self._bytes = sum(part.nbytes for part in self._parts)

    def gb_per_s(self, passes: int = 3) -> float:
        """The best of a few passes (one reads everything once): a bound is what the machine can do."""
        best = float("inf")
        with ThreadPoolExecutor(len(self._parts)) as pool:
            for _ in range(passes):
                started = time.perf_counter()
                list(pool.map(_read, self._parts))
                best = min(best, time.perf_counter() - started)
        return self._bytes / best / 1e9


def _read(part: np.ndarray) -> float:  # type: ignore[type-arg]
    return float(np.maximum.reduce(part))  # of numpy's reductions the fastest; a sum is bound by its additions
