"""The turn-around between two decode steps on a device (turnaround.h), from Python: its structures, and how it is built.

Nothing here loads CUDA: `build` needs nvcc for the kernel, any C++ compiler for the host's version.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from skipdecode import sampling
from skipdecode.errors import TargetError

SOURCE = Path(__file__).parent / "turnaround.cu"
ARCHITECTURES = ("80", "89", "90")  # compute capabilities that the kernel is compiled for


class Sampling(ctypes.Structure):
    """`SkdSampling`: as `skipdecode.sampling.Sampling`."""

    _fields_ = (
        ("do_sample", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
    )

    @classmethod
    def of(cls, how: sampling.Sampling) -> Sampling:
        """The same in C."""
        return cls(how.do_sample, how.top_k, how.temperature, how.top_p, how.seed)


class TurnAround(ctypes.Structure):
    """`SkdTurnaround`: B rows, V tokens of vocabulary; addresses of arrays that the caller keeps."""

    _fields_ = (
        ("rows", ctypes.c_int32),
        ("vocabulary", ctypes.c_int32),
        ("max_steps", ctypes.c_int32),
        ("stop_count", ctypes.c_int32),
        ("logits", ctypes.c_void_p),  # [B, V] float32
        ("row_ids", ctypes.c_void_p),  # [B] int64
        ("stop_ids", ctypes.c_void_p),  # [stop_count] int64
        ("steps", ctypes.c_void_p),  # [B] int32
        ("input_ids", ctypes.c_void_p),  # [B] int64
        ("position_ids", ctypes.c_void_p),  # [B] int64
        ("seqlens_k", ctypes.c_void_p),  # [B] int32
        ("finished", ctypes.c_void_p),  # [B] int32
        ("tokens", ctypes.c_void_p),  # [B, max_steps] int64
    )


def build(library: Path, *, device: bool) -> ctypes.CDLL:
    """Compile the turn-around to the shared library `library` and load it.

    Args:
        device: with the kernel, for ARCHITECTURES, by nvcc; else the host's version alone, by c++.

    Raises:
        TargetError: the compiler is not there, or refuses.
    """
    compiler = "nvcc" if device else "c++"
    if shutil.which(compiler) is None:
        raise TargetError(f"the turn-around needs {compiler}, which is not on the PATH", "install it", where="plugins/turnaround")
    command = [compiler, "-O3", "-std=c++17", "-shared", "-o", str(library)]
    if device:
        command += ["-Xcompiler", "-fPIC,-Wall", "-Werror", "all-warnings", "-cudart", "static"]
        command += [f"-gencode=arch=compute_{one},code=sm_{one}" for one in ARCHITECTURES]
        command += [f"-gencode=arch=compute_{ARCHITECTURES[-1]},code=compute_{ARCHITECTURES[-1]}"]  # PTX for later ones
    else:
        command += ["-fPIC", "-Wall", "-Wextra", "-Werror", "-x", "c++"]
    done = subprocess.run([*command, str(SOURCE)], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise TargetError(f"{compiler} refuses the turn-around ({reason})", "see its sources", where=str(SOURCE))
    loaded = ctypes.CDLL(str(library))
    loaded.skd_turnaround_host.restype = None
    return loaded
