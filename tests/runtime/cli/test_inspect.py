"""What skip-inspect shows, mostly for a bundle made by hand."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skipdecode import manifest as manifests
from skipdecode.cli.inspect import main, picture
from skipdecode.model import KeyValueSizes, LayerGroup, State
from skipdecode.schedule import Anchor, Schedule, full_depth
from tests.manifests import make_manifest
from tests.models import LAYERS
from tests.zoo import Zoo

SCHEDULE = Schedule(name="table", num_layers=6, warmup_layers=1, layers=(5, 4, 4, 2))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Engines of a few bytes; segment 1 has its weights in a second file."""
    folder = tmp_path / "bundle"
    manifest = make_manifest(SCHEDULE, folder)
    (folder / "segment_1.bin").write_bytes(b"w" * 1000)
    weights = manifests.describe_file(folder, "segment_1.bin")
    manifests.write(dataclasses.replace(manifest, files=(*manifest.files, weights)), folder)
    return folder


def rename(bundle: Path, name: str) -> None:
    manifest = manifests.read(bundle)
    manifests.write(dataclasses.replace(manifest, model=dataclasses.replace(manifest.model, name=name)), bundle)


def test_layers_that_keep_or_read_something_else_than_most_are_listed(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conv, recurrent = State(name="conv_state", shape=(6, 3)), State(name="recurrent_state", shape=(2, 4, 5))
    groups = (
        LayerGroup(layers=(2, 4), keys=None, keys_of=None, states=(conv, recurrent)),
        LayerGroup(layers=(1,), keys=KeyValueSizes(num_heads=2, head_size=4), keys_of=None, states=(conv,)),
        LayerGroup(layers=(3,), keys=None, keys_of=None, states=()),
        LayerGroup(layers=(0,), keys=KeyValueSizes(num_heads=1, head_size=8), keys_of=None, states=()),
        LayerGroup(layers=(5,), keys=None, keys_of=0, states=()),
    )
    manifest = manifests.read(bundle)
    model = dataclasses.replace(manifest.model, state_layers=groups)
    manifests.write(dataclasses.replace(manifest, model=model), bundle)
    assert main([str(bundle)]) == 0
    assert capsys.readouterr().out.splitlines()[1:6] == [
        "2 layers keep conv_state [6,3], recurrent_state [2,4,5] instead of keys and values",
        "1 layer keeps conv_state [6,3] and 2 key/value heads of 4",
        "1 layer keeps nothing instead of keys and values",
        "1 layer keeps 1 key/value heads of 8",
        "1 layer reads the keys and values of layer 0 and keeps nothing",
    ]
    assert main([str(bundle), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"]["state_layers"] == json.loads(json.dumps([dataclasses.asdict(group) for group in groups]))


def test_a_model_whose_layers_all_keep_states_has_no_heads(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = manifests.read(bundle)
    every = LayerGroup(layers=tuple(range(6)), keys=None, keys_of=None, states=(State(name="conv_state", shape=(6, 3)),))
    model = dataclasses.replace(manifest.model, num_heads=0, num_kv_heads=0, head_size=0, state_layers=(every,))
    manifests.write(dataclasses.replace(manifest, model=model), bundle)
    assert main([str(bundle)]) == 0
    assert ", no attention, vocabulary " in capsys.readouterr().out.splitlines()[0]


def test_the_picture_has_the_top_layer_first_and_warm_up_layers_marked() -> None:
    schedule = Schedule(name="table", num_layers=4, warmup_layers=1, layers=(4, 3, 2))
    assert picture(schedule)[:4] == ["    3 ███", "    2 ██·", "    1 █··", "    0 ▓▓▓"]


def test_a_long_span_is_drawn_in_64_columns_over_its_positions() -> None:
    schedule = Schedule(name="table", num_layers=3, warmup_layers=1, layers=(3,) * 500 + (2,) * 500)
    top, middle, warmup, axis = picture(schedule)
    assert (top[6:], middle[6:], warmup[6:]) == ("█" * 64, "█" * 32 + "·" * 32, "▓" * 64)
    assert axis.split() == ["0", "999", "and", "on"] and len(axis) == 6 + 64


def test_a_long_spans_last_column_is_its_last_position() -> None:
    schedule = Schedule(name="table", num_layers=3, warmup_layers=1, layers=(3,) * 127 + (2,))
    assert picture(schedule)[1][6:] == "█" * 63 + "·"


def test_early_exit_has_no_warm_up_layers_to_mark() -> None:
    schedule = Schedule(name="table", num_layers=3, warmup_layers=3, layers=(3, 2, 1))
    assert picture(schedule)[:3] == ["    2 █··", "    1 ██·", "    0 ███"]


def test_the_baseline_is_drawn_without_a_skipped_layer() -> None:
    assert "·" not in "".join(picture(full_depth(3)))


def test_the_page_names_the_model_variants_segments_and_memory(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bundle)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "m: opt, 6 layers x 8, 2 heads (2 key/value) of 4, vocabulary 9, 0.0 M parameters",
        "limits: 32 tokens a row, 4 rows",
        "schedule table, anchor generated: 5 -> 2 layers over 4 positions, mean 3.8 (1.60x fewer)",
        "5 ████",
        "0 ▓▓▓▓",
        "v6 prefill and baseline segments 0 1 2 3 4",
        "v4 positions 1 .. 2 segments 0 3 4",
        "v2 positions 3 and on segments 0 4",
        "segment 3 layers 3-4 0.0 MiB",
    ):
        assert line in lines, line
    assert any(line.startswith("target cpu: ") and line.endswith("onnxruntime 1, x86_64 avx2") for line in lines)


def test_with_an_absolute_anchor_full_depth_is_only_the_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absolute = dataclasses.replace(SCHEDULE, anchor=Anchor.ABSOLUTE)
    manifests.write(make_manifest(absolute, tmp_path / "bundle"), tmp_path / "bundle")
    assert main([str(tmp_path / "bundle")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "v6 baseline segments 0 1 2 3 4" in lines


def test_json_has_the_same_figures_with_units(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bundle), "--json"]) == 0
    output = capsys.readouterr().out
    data: dict[str, Any] = json.loads(output)
    assert output.count("\n") == 1
    assert data["schedule"]["layers"] == [5, 4, 4, 2] and data["schedule"]["mean_layers"] == 3.75
    assert {v["name"]: v["positions"] for v in data["variants"]} == {"v6": None, "v5": [0, 0], "v4": [1, 2], "v2": [3, None]}
    assert [s["layers"] for s in data["segments"]] == [list(s) for s in manifests.read(bundle).segments]
    target = data["targets"][0]
    assert target["segment_bytes"][:2] == [14, 14 + 1000], "an engine is counted together with its weights"
    assert (target["embed_bytes"], target["head_bytes"]) == (10, 9)
    assert data["bundle_bytes"] == sum(file.size for file in manifests.read(bundle).files)


def test_a_rows_kv_buffer_has_the_schedules_shape(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bundle), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    prompt, slot = 16, 2 * 2 * 4 * 4  # half of 32 tokens; keys and values of 2 heads of 4 float32
    steps = [sum(layer in SCHEDULE.active(t) for t in range(16)) for layer in range(6)]
    assert data["kv_prompt_tokens"] == prompt
    assert data["kv_bytes_per_row"] == slot * sum(prompt + count for count in steps if count)
    assert data["kv_bytes_per_row_without_skipping"] == slot * 6 * 32


def test_a_real_bundle_passes_the_check_of_its_hashes(zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(zoo.bundle("llama")), "--json", "--check-hashes"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"]["layers"] == LAYERS
    assert data["kv_bytes_per_row"] < data["kv_bytes_per_row_without_skipping"]


def test_a_changed_byte_is_found_only_when_hashes_are_checked(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "segment_1.bin").write_bytes(b"x" * 1000)
    assert main([str(bundle), "--quiet"]) == 0
    assert main([str(bundle), "--quiet", "--check-hashes"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "segment_1.bin" in err


def test_a_folder_that_is_not_a_bundle_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1


def test_debug_prints_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--debug"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("Traceback") and "BundleError" in err.splitlines()[-1]


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["a", "--nothing\nlike it"]])
def test_wrong_arguments_are_one_line_and_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_terminal_without_block_characters_gets_plain_ones(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename(bundle, "modèle")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main([str(bundle)]) == 0
    page = written.getvalue().decode("ascii")
    assert "    5 ####\n" in page and "    0 %%%%\n" in page and page.startswith("mod\\xe8le: opt")


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nb", "a\ud800b"])
def test_control_codes_in_a_name_do_not_reach_the_terminal(bundle: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rename(bundle, name)
    assert main([str(bundle)]) == 0
    page = capsys.readouterr().out
    assert page.splitlines()[0].startswith("a\\") and "\x1b" not in page


def test_a_reader_that_goes_away_is_not_an_error(bundle: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "skipdecode.cli.inspect", str(bundle)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_hashes_are_also_checked_for_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifests.write(make_manifest(SCHEDULE, tmp_path), tmp_path)
    (tmp_path / "head.onnx").write_bytes(b"HEAD.onnx")
    assert main([str(tmp_path), "--json", "--check-hashes"]) == 2
    assert capsys.readouterr().out == ""
