"""What skip-inspect shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skipdecode.cli.inspect import main, picture
from skipdecode.schedule import Schedule
from tests.conftest import LAYERS, Zoo


def test_the_picture_has_the_top_layer_first_and_warm_up_layers_marked() -> None:
    schedule = Schedule(name="table", num_layers=4, warmup_layers=1, layers=(4, 3, 2))
    assert picture(schedule)[:4] == ["    3 ███", "    2 ██·", "    1 █··", "    0 ▓▓▓"]


def test_the_page_names_variants_segments_and_memory(zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(zoo.bundle("llama"))]) == 0
    page = capsys.readouterr().out
    for words in (
        "schedule linear",
        "positions 0",
        "prefill and baseline|v6",
        "segment 0",
        "once for all 5 variants",
        "without skipping",
    ):
        assert any(word in page for word in words.split("|")), words


def test_json_has_units_and_a_smaller_kv_buffer_than_full_depth(zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(zoo.bundle("llama")), "--json", "--check-hashes"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"]["layers"] == LAYERS
    assert data["kv_bytes_per_row"] < data["kv_bytes_per_row_without_skipping"]
    assert sorted(layer for segment in data["segments"] for layer in segment["layers"]) == list(range(LAYERS))


def test_a_folder_that_is_no_bundle_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
