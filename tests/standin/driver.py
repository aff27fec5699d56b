"""Builds libcuda.cc, which stands in for NVIDIA's driver."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from skipdecode.plugins import turnaround

_SOURCE = Path(__file__).parent / "libcuda.cc"


def build(folder: Path) -> Path:
    """A libcuda.so.1 in `folder`, which goes on LD_LIBRARY_PATH; returns the folder. Skips where nvcc is missing."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc, which brings cuda.h, is not on the PATH")
    command = ["nvcc", "-std=c++17", "-shared", "-cudart", "none", "-Xcompiler", "-fPIC,-Wall,-Wextra,-Werror"]
    command += ["-Xlinker", "-soname=libcuda.so.1", "-x", "c++", str(_SOURCE), str(turnaround.SOURCE)]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], check=True)
    return folder
