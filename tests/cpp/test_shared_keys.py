"""Layers that read other layers' keys and values, of several sizes: the C++ runtime agrees with Python's."""

from __future__ import annotations

import json
import shutil
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


def test_a_schedule_that_skips_layers_whose_keys_others_read_is_refused(bundle: Path, tmp_path: Path, driver: Driver) -> None:
    """Only a bundle of full depth, whose schedule has no warm-up layers, lets a session's schedule skip them."""
    full = Path(shutil.copytree(bundle, tmp_path / "full"))
    data = json.loads((full / "bundle.json").read_text())
    data["schedule"].update(layers=[6], warmup_layers=0)
    data.update(kv_slots=[None] * 6, variants=[variant for variant in data["variants"] if variant["num_layers"] == 6])
    (full / "bundle.json").write_text(json.dumps(data))
    asked = {"command": "session", "bundle": full, "prompts": [[5, 6]], "max_new_tokens": 3}
    assert driver.ask(**asked, schedule=[6, 5])["layers"] == [6, 5]  # layer 0 is read by none
    refused = driver.ask(**asked, schedule=[6, 4])["error"]
    assert refused.startswith("the schedule skips layers whose keys and values later layers read; choose other layer counts")
