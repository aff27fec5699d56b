"""The turn-around between two decode steps on a device (plugins/turnaround): its arguments and its kernel.

The structures are those of turnaround.h. The kernel comes as PTX, which the driver compiles for the GPU at hand, so running it
needs no compiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from skipdecode.sampling import Sampling

KERNEL, THREADS = "skd_turnaround_kernel", 1024  # as turnaround.cu and turnaround.h have them
_MAX_INT = 2**31 - 1  # largest C int; no vocabulary is larger


def ptx() -> bytes:
    """The kernel as PTX, for compute capability 7.5 and all later ones."""
    spec = find_spec("skipdecode.plugins.turnaround")  # only data: no code of plugins is imported
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).with_name("turnaround.ptx").read_bytes()


class SkdSampling(ctypes.Structure):
    """How a row's token is chosen: `skipdecode.sampling.Sampling` in C."""

    _fields_ = (
        ("do_sample", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
    )

    @classmethod
    def of(cls, sampling: Sampling) -> SkdSampling:
        """`sampling` in C; all zeros if it is greedy."""
        if not sampling.do_sample:
            return cls()
        return cls(True, min(sampling.top_k, _MAX_INT), sampling.temperature, sampling.top_p, sampling.seed)


class SkdTurnaround(ctypes.Structure):
    """What one turn-around reads and writes: B rows, a vocabulary of V, and addresses of arrays that the caller keeps alive."""

    _fields_ = (
        ("rows", ctypes.c_int32),
        ("vocabulary", ctypes.c_int32),
        ("kept_steps", ctypes.c_int32),
        ("stop_count", ctypes.c_int32),
        ("logits", ctypes.c_void_p),  # [B, V] float32
        ("sampling", ctypes.c_void_p),  # [B] SkdSampling
        ("row_ids", ctypes.c_void_p),  # [B] int64
        ("stop_ids", ctypes.c_void_p),  # [stop_count] int64
        ("steps", ctypes.c_void_p),  # [B] int32
        ("input_ids", ctypes.c_void_p),  # [B] int64
        ("position_ids", ctypes.c_void_p),  # [B] int64
        ("seqlens_k", ctypes.c_void_p),  # [B] int32
        ("finished", ctypes.c_void_p),  # [B] int32
        ("tokens", ctypes.c_void_p),  # [kept_steps, B] int64
    )


TurnAround = Callable[[SkdTurnaround], None]  # runs one turn-around, on the device that the addresses belong to
