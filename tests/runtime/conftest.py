"""Bundles for GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import ScheduleRequest
from tests.models import LAYERS, MAX_LENGTH
from tests.standin import package
from tests.zoo import Zoo


@pytest.fixture(scope="session")
def gpu_bundle(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Anchor], Path]:
    """Bundles of a grouped-query model with tied embedding and head for ONNX Runtime's CUDA provider and TensorRT, by anchor.

    With the absolute anchor, the rows of a batch differ in depth.
    """
    folder = tmp_path_factory.mktemp("gpu")

    @functools.cache
    def made(anchor: Anchor) -> Path:
        line = ScheduleRequest(name="linear", max_layers=LAYERS, min_layers=2, span=12, max_variants=3, anchor=anchor)
        export(
            ExportRequest(
                model=str(zoo.checkpoint("qwen2")), out=folder / str(anchor), schedule=line, dtype="fp16", max_batch=4,
                max_length=MAX_LENGTH, targets=("cuda", "tensorrt-rtx:sm89"),
            )
        )  # fmt: skip
        return folder / str(anchor)

    return made


@pytest.fixture(scope="session")
def tensorrt_bundle(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model for the newest version of the package `tensorrt`."""
    folder = tmp_path_factory.mktemp("tensorrt")
    environment, schedule = package.builder(package.VERSIONS[-1], folder / "package"), ("--min-layers", 2, "--span", 12)
    done = package.export(environment, zoo.checkpoint("qwen2"), folder / "bundle", "--max-layers", LAYERS, *schedule)
    assert done.returncode == 0, done.stderr
    return folder / "bundle"
