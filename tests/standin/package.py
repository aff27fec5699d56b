"""Stand-ins for the Python package `tensorrt`, whose libraries are out of reach.

Its Python bindings are on PyPI, and `make bindings` gets them. They tell which classes and names the package has. A package
`tensorrt` that is TensorRT-RTX with only those builds plans, as the real one would on a machine with a GPU.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.models import MAX_LENGTH
from tests.standin import driver

VERSIONS = ("10.15.1.29", "11.4.0.106")  # the first that updates a KV buffer in place, and the last
_HERE = Path(__file__).parent
_IN_ONE_FILE = ("nvinfer", "nvinfer_plugin", "nvonnxparser")
_ASK = """
import json, tensorrt
def public(value): return [name for name in dir(value) if not name.startswith("_")]
found = {name: getattr(tensorrt, name) for name in public(tensorrt)}
names = {name: public(value) if isinstance(value, type) else None for name, value in found.items()}
print(json.dumps({"version": tensorrt.__version__, "names": names}))
"""


def bindings(version: str, folder: Path, *, libraries: bool = True) -> dict[str, str]:
    """An environment in which `tensorrt` is the real package, with libraries that find no GPU, or with none at all.

    Skips where its bindings are not installed.
    """
    installed = _HERE.parents[1] / "build" / f"tensorrt-{version}"
    if not (installed / "tensorrt_bindings").is_dir():
        pytest.skip(f"build/tensorrt-{version} is not there: make bindings")
    package = folder / "tensorrt"
    package.mkdir(parents=True)
    lines = ("from tensorrt_bindings import *", "from tensorrt_bindings import __version__")  # all of the wheel but the bindings
    (package / "__init__.py").write_text("\n".join(lines), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{installed}"}
    if libraries:
        first, *others = (folder / f"lib{name}.so.{version.partition('.')[0]}" for name in _IN_ONE_FILE)
        command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror", _HERE / "libnvinfer.cc", "-o", first]
        subprocess.run(command, check=True)
        for other in others:
            other.symlink_to(first.name)
        known = os.environ.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = os.pathsep.join([str(folder), *([known] if known else [])])
    return environment


@functools.cache
def names(version: str) -> dict[str, Any]:
    """The package's `version` and its `names`: each one's members if it is a class, None for anything else."""
    with tempfile.TemporaryDirectory() as folder:
        environment = bindings(version, Path(folder))
        done = subprocess.run([sys.executable, "-c", _ASK], env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def builder(version: str, folder: Path) -> dict[str, str]:
    """An environment in which `tensorrt` is a package of that version that builds plans, for the stand-in for a GPU."""
    package = folder / "tensorrt"
    package.mkdir(parents=True)
    shutil.copyfile(_HERE / "reduced.py", package / "__init__.py")
    (package / "names.json").write_text(json.dumps(names(version)), encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(driver.build(folder))}


def export(environment: dict[str, str], checkpoint: Path, out: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """Run skip-export for `tensorrt` in a process of its own: names that `reduced` deletes are gone for the whole process."""
    command = [Path(sys.executable).parent / "skip-export", checkpoint, "--out", out, "--target", "tensorrt"]
    command += ["--max-variants", 3, "--max-batch", 4, "--max-length", MAX_LENGTH, *options]
    return subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)
