"""Layers that read other layers' keys and values, of several sizes: the C++ runtime agrees with Python's."""

from __future__ import annotations

from pathlib import Path

import pytest

from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule_builders import ScheduleRequest
from tests.cpp.conftest import LENGTHS, LONG, Driver, assert_agrees_with_python
from tests.zoo import Zoo


@pytest.fixture(scope="module")
def bundle(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with one engine per layer."""
    out = tmp_path_factory.mktemp("reading") / "bundle"
    schedule = ScheduleRequest(name="linear", max_layers=6, min_layers=4, span=10)
    export(
        ExportRequest(
            model=str(zoo.checkpoint("reading_others")), out=out, schedule=schedule, max_batch=4, max_length=2 * LONG,
            segment_bytes=1,
        )
    )  # fmt: skip
    return out


@pytest.mark.parametrize("lengths", LENGTHS)
def test_both_runtimes_give_the_same_results(lengths: str, bundle: Path, driver: Driver) -> None:
    assert_agrees_with_python(driver, bundle, LENGTHS[lengths])
