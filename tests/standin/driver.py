"""Build what stands in for NVIDIA's driver (libcuda.cc) and, on top of it, for CUDA's runtime and cuBLAS (libcudart.cc)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from skipdecode.plugins import turnaround

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_PROVIDER = _ROOT / "build" / "onnxruntime-gpu"
_RUNTIME = "libcudart.so.13"
_IN_THE_SAME_FILE = ("libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10")


def build(folder: Path) -> Path:
    """Build libcuda.so.1 in `folder`, which goes on LD_LIBRARY_PATH, and return the folder. Skips where nvcc is missing."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc, which brings cuda.h, is not on the PATH")
    _compile(folder / "libcuda.so.1", str(_HERE / "libcuda.cc"), str(turnaround.SOURCE))
    return folder


def build_runtime(folder: Path) -> Path:
    """As `build`, together with the libraries that onnxruntime-gpu is linked to."""
    build(folder)
    _compile(folder / _RUNTIME, str(_HERE / "libcudart.cc"), "-L", str(folder), "-l:libcuda.so.1")
    for name in _IN_THE_SAME_FILE:
        (folder / name).symlink_to(_RUNTIME)
    return folder


def ask_provider(libraries: Path, *bundles: Path) -> subprocess.CompletedProcess[str]:
    """Run `tests.standin.provider` on the bundles, with the `libraries` of `build_runtime`."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": str(provider())}
    command = [sys.executable, "-m", "tests.standin.provider", *map(str, bundles)]
    return subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, env=environment, check=False)


def provider() -> Path:
    """The folder of onnxruntime-gpu, which goes on PYTHONPATH. Skips where it is not installed."""
    if not (_PROVIDER / "onnxruntime").is_dir():
        pytest.skip("build/onnxruntime-gpu is not there: make provider")
    return _PROVIDER


def _compile(library: Path, *given: str) -> None:
    command = ["nvcc", "-std=c++17", "-shared", "-cudart", "none", "-Xcompiler", "-fPIC,-Wall,-Wextra,-Werror"]
    command += ["-Xlinker", f"-soname={library.name}", "-x", "c++", *given]
    subprocess.run([*command, "-o", str(library)], check=True)
