"""Layers that read the keys and values of others, of several sizes: the C++ runtime gives what Python's gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule_builders import ScheduleRequest
from tests.conftest import READING_OTHERS
from tests.cpp.conftest import LENGTHS, LONG, Driver, assert_gives_what_python_gives


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One engine a layer."""
    folder = tmp_path_factory.mktemp("reading")
    transformers.AutoModelForCausalLM.from_config(READING_OTHERS()).save_pretrained(folder / "model")
    schedule = ScheduleRequest(name="linear", max_layers=6, min_layers=4, span=10)
    export(
        ExportRequest(
            model=str(folder / "model"), out=folder / "bundle", schedule=schedule, max_batch=4, max_length=2 * LONG,
            segment_bytes=1,
        )
    )  # fmt: skip
    return folder / "bundle"


@pytest.mark.parametrize("lengths", LENGTHS)
def test_both_runtimes_give_the_same(lengths: str, bundle: Path, driver: Driver) -> None:
    assert_gives_what_python_gives(driver, bundle, LENGTHS[lengths])
