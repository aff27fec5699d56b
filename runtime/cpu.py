"""What this process may use of the CPU: its cores, and the instruction sets that prepacked weights are laid out for."""

from __future__ import annotations

import os
from pathlib import Path

from skipdecode.control_group import cpu_quota

# those by which MLAS, ONNX Runtime's matrix library, chooses its kernels
_KERNEL_FEATURES = (
    "avx",
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx_vnni",
    "amx_tile",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
    "sve",
)


def usable_cores() -> int:
    """How many cores this process may use: those that it may run on, but no more than a container's CPU quota allows.

    Threads of a pool wait for one another, so all stop once the quota is spent: two threads on a quota of one core take 1.7x
    the time of one thread (docs/limits.md).
    """
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_features() -> tuple[str, ...]:
    """The instruction sets of this CPU by which ONNX Runtime chooses matrix kernels; empty if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    flags = next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith(("flags", "Features"))), set())
    return tuple(name for name in _KERNEL_FEATURES if name in flags)
