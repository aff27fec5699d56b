"""What the figures were measured on: CPU, memory, versions, and the bandwidth that bounds a decode step."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from skipdecode.cpu import usable_cores
from skipdecode.device import Device

_PASSES = 3  # over the array
_COPIES, _COPY_ROUNDS = 10, 5  # consecutive copies, and rounds of them


def machine_facts(libraries: Sequence[str]) -> dict[str, Any]:
    """CPU model, cores this process may use, memory, and the versions of those `libraries` that are installed."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    return {
        "cpu": models[0].strip() if models else platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "libraries": {name: found for name in libraries if (found := _version(name))},
    }


def resident_bytes() -> int:
    """Resident memory of this process now, including the touched pages of mapped weights."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class ReadBandwidth:
    """Reads an array far larger than the last-level cache, with as many threads as the engines get."""

    def __init__(self, threads: int, mib: int = 512) -> None:
        self._parts = np.array_split(np.ones(mib << 18, dtype=np.float32), threads)
        self._bytes = sum(part.nbytes for part in self._parts)

    def gb_per_s(self) -> float:
        """The best of a few passes over the whole array: a bound is what the machine can do."""
        best = float("inf")
        with ThreadPoolExecutor(len(self._parts)) as pool:
            for _ in range(_PASSES):
                started = time.perf_counter()
                list(pool.map(_read, self._parts))
                best = min(best, time.perf_counter() - started)
        return self._bytes / best / 1e9


def copy_gb_per_s(device: Device, mib: int = 256) -> float:
    """GB/s, read plus written, of copying `mib` MiB within the device ten times in a row; the best of a few rounds.

    Raises:
        CapacityError: the device has no room for them.
    """
    source, target = (device.allocate(mib << 20) for _ in range(2))
    best = float("inf")
    for _ in range(_COPY_ROUNDS):
        device.mark()()
        started = time.perf_counter()
        for _ in range(_COPIES):
            device.copy(target.pointer, source.pointer, source.nbytes)
        device.mark()()
        best = min(best, time.perf_counter() - started)
    return 2 * _COPIES * source.nbytes / best / 1e9


def _read(part: np.ndarray[Any, np.dtype[np.float32]]) -> float:
    return float(np.maximum.reduce(part))  # numpy's fastest reduction: a sum is bound by its additions


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
