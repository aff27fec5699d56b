"""The C++ runtime as `make cpp` built it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skipdecode
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import ScheduleRequest
from tests.conformance.record import OPTIONS, clear_prompts, run
from tests.once import made_once, shared_folder
from tests.zoo import Zoo, edit_config

BUILD = Path(__file__).parents[2] / "build" / "cpp"
LIBRARIES = BUILD / "deps" / "lib"
SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": f"suppressions={Path(__file__).parent / 'thread_sanitizer.supp'} ignore_noninstrumented_modules=1",
}
LONG = 600  # tokens of a prompt that takes two passes (decoder.cc)
LENGTHS = {"ragged": [2, 7, 1, 3], "long": [3, LONG]}  # of prompts


class Driver:
    """tests/cpp/driver.cc: one request per line, one answer per line."""

    def __init__(self, *started_by: str, **environment: str) -> None:
        command, pipe = [*started_by, BUILD / "release" / "tests" / "skd_driver"], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **environment})

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request, default=str) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the driver ended with {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def num_threads(self) -> int:
        return len(list(Path(f"/proc/{self._process.pid}/task").iterdir()))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(timeout=30) == 0


def replacing(bundle: Path, by: Path, library: str, folder: Path) -> Path:
    """A library that brings in one of LIBRARIES and, as it is loaded, replaces the bundle by another folder."""
    (folder / "replacing.cc").write_text(
        "#include <stdio.h>\n"
        "__attribute__((constructor)) static void Replace() {\n"
        f"  rename({_c(bundle)}, {_c(bundle.with_name('before'))});\n"
        f"  rename({_c(by)}, {_c(bundle)});\n"
        "}\n"
    )
    own, flags = folder / "replacing.so", ["-shared", "-fPIC", "-Wl,--no-as-needed", f"-Wl,-rpath,{LIBRARIES}"]
    subprocess.run(["g++", *flags, folder / "replacing.cc", LIBRARIES / library, "-o", own], check=True, timeout=60)
    return own


def _c(path: Path) -> str:
    return json.dumps(str(path))


def assert_agrees_with_python(driver: Driver, bundle: Path, lengths: list[int]) -> None:
    """Compare the tokens of random prompts with every set of options, and their logits."""
    generator = skipdecode.load(bundle)
    prompts, logits = clear_prompts(generator, lengths, 5e-3)
    asked = {"bundle": bundle, "prompts": prompts}
    for options in OPTIONS.values():
        chosen = {**options, "ignore_eos": True}  # Python runs ended rows until half have ended, C++ frees them
        assert driver.ask(command="generate", **asked, **chosen) == run(generator, prompts, chosen)
    found = driver.ask(command="session", **asked, max_new_tokens=17, ignore_eos=True)["logits"]
    np.testing.assert_allclose(np.array(found)[:, :16], logits, atol=1e-3, rtol=0)


def skip_unless_built() -> None:
    if not (BUILD / "release" / "tests" / "skd_driver").exists():
        pytest.skip("the C++ library is not built: make cpp")


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    skip_unless_built()


@pytest.fixture(scope="session")
def hybrid_bundles(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> dict[Anchor, Path]:
    """Models that keep states alongside keys and values or in their place, also in layers that no decode step computes.

    The bundles take prompts of more than one pass.
    """

    def make(folder: Path) -> None:
        for anchor, name in zip(Anchor, ("falcon_h1", "qwen3_5_text"), strict=True):
            checkpoint = shutil.copytree(zoo.checkpoint(name), folder / name)
            edit_config(checkpoint, max_position_embeddings=2 * LONG)
            schedule = ScheduleRequest(name="linear", max_layers=5, min_layers=2, span=10, anchor=anchor)
            export(
                ExportRequest(
                    model=str(checkpoint), out=folder / anchor, schedule=schedule, max_batch=4, max_length=2 * LONG, slim=True
                )
            )

    folder = made_once(shared_folder(tmp_path_factory) / "hybrid", make)
    return {anchor: folder / anchor for anchor in Anchor}


@pytest.fixture(scope="module")
def driver(built: None) -> Iterator[Driver]:
    opened = Driver()
    yield opened
    opened.close()
