"""Bundles for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import ScheduleRequest
from tests.builders import building_here
from tests.models import LAYERS, MAX_LENGTH
from tests.once import made_once, shared_folder
from tests.standin import package
from tests.standin.tensorrt import library
from tests.zoo import Zoo


@pytest.fixture(scope="session")
def gpu_bundle(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Anchor], Path]:
    """Bundles of a grouped-query model with tied embedding and head for ONNX Runtime's CUDA provider and TensorRT, by anchor.

    With the absolute anchor, the rows of a batch differ in depth.
    """
    folder = shared_folder(tmp_path_factory)

    def make(anchor: Anchor, out: Path) -> None:
        line = ScheduleRequest(name="linear", max_layers=LAYERS, min_layers=2, span=12, max_variants=3, anchor=anchor)
        request = ExportRequest(
            model=str(zoo.checkpoint("qwen2")), out=out, schedule=line, dtype="fp16", max_batch=4,
            max_length=MAX_LENGTH, targets=("cuda", "tensorrt-rtx:sm89"),
        )  # fmt: skip
        with building_here():
            export(request)
        _lower(out, "tensorrt-rtx")

    return lambda anchor: made_once(folder / f"gpu-{anchor}", lambda out: make(anchor, out))


def _lower(bundle: Path, target: str) -> None:
    """Write the graphs that the stand-in runs, which takes a process that has loaded torch little time."""
    library(bundle, lambda stream, work: work(), target)


@pytest.fixture(scope="session")
def tensorrt_bundle(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model for the newest version of the package `tensorrt`."""

    def make(out: Path) -> None:
        environment = package.builder(package.VERSIONS[-1], tmp_path_factory.mktemp("tensorrt") / "package")
        schedule = ("--max-layers", LAYERS, "--min-layers", 2, "--span", 12)
        done = package.export(environment, zoo.checkpoint("qwen2"), out, *schedule)
        assert done.returncode == 0, done.stderr
        _lower(out, "tensorrt")

    return made_once(shared_folder(tmp_path_factory) / "tensorrt", make)
