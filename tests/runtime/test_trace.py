"""A trace holds steps, their engines and the engines' operators, on one clock."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skipdecode.cli import run
from skipdecode.errors import CapacityError
from skipdecode.manifest import read
from skipdecode.trace import Trace
from tests.zoo import Zoo

Event = dict[str, Any]


def _trace(zoo: Zoo, path: Path) -> list[Event]:
    command = [str(zoo.bundle("llama")), "--token-ids", "5,6,7", "--max-new-tokens", "4", "--json", "--profile", str(path)]
    assert run.main(command) == 0
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def _inside(outer: Event, events: list[Event]) -> list[Event]:
    end = outer["ts"] + outer["dur"]
    return [each for each in events if outer["ts"] <= each["ts"] and each["ts"] + each["dur"] <= end]


def test_every_step_shows_its_engines_and_every_engine_its_operators(zoo: Zoo, tmp_path: Path, capsys: Any) -> None:
    events = _trace(zoo, tmp_path / "trace.json")
    layers = json.loads(capsys.readouterr().out)["layers"]
    kinds = {kind: [each for each in events if each["cat"] == kind] for kind in ("loop", "engine", "operator")}
    steps = [each for each in kinds["loop"] if each["name"] == "decode step"]
    assert [step["args"]["layers"] for step in steps] == layers
    assert [each["name"] for each in kinds["loop"]].count("prefill") == 1
    manifest = read(zoo.bundle("llama"))
    climbed = {variant.num_layers: variant.segments for variant in manifest.variants}
    for step, count in zip(steps, layers, strict=True):
        segments = [f"segment_{index:03d}" for index in climbed[count]]
        assert [each["name"] for each in _inside(step, kinds["engine"])] == ["embed", *segments, "head"]
    attention = [each for each in kinds["operator"] if each["args"]["op_name"] == "GroupQueryAttention"]
    assert len(attention) == sum(layers) + manifest.model.num_layers, "each layer of each step, and of the prefill"
    assert len([each for engine in kinds["engine"] for each in _inside(engine, attention)]) == len(attention), "one clock"


def test_a_trace_that_cannot_be_written_is_reported_in_one_line(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        str(zoo.bundle("llama")),
        "--token-ids",
        "5",
        "--max-new-tokens",
        "2",
        "--profile",
        str(tmp_path / "no" / "t.json"),
    ]
    assert run.main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--profile" in error and "cannot be written" in error


@pytest.mark.parametrize("written", ['[{"cat": "Node", "na', "", None])
def test_a_profile_that_a_full_disk_cut_off_is_reported_in_one_line(written: str | None, tmp_path: Path) -> None:
    profile, trace = tmp_path / "session0.json", Trace()
    if written is not None:
        profile.write_text(written)
    session: Any = SimpleNamespace(get_profiling_start_time_ns=lambda: 0, end_profiling=lambda: str(profile))
    trace.follow(session)
    with pytest.raises(CapacityError, match=r": a profile is not whole; free space there, or set TMPDIR to a folder with more$"):
        trace.write(tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
