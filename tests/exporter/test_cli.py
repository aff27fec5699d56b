"""skip-export's options: each reaches the export, and those left out have the defaults of a request from Python."""

from __future__ import annotations

import dataclasses
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from skipdecode.exporter import adapter_config, cli, command
from skipdecode.exporter.export import ExportRequest
from skipdecode.graph_passes.compile_tensorrt import BuilderOptions
from skipdecode.schedule import Anchor, Schedule
from skipdecode.schedule_builders import ScheduleRequest
from tests.exporter.without_torch import SKIP_EXPORT
from tests.manifests import make_manifest

ALL = (
    "--schedule power --speedup 3 --max-layers 20 --min-layers 4 --warmup-layers 2 --span 30 --alpha 0.9 --anchor absolute"
    " --max-variants 5 --max-batch 7 --max-length 99 --dtype bf16 --quantize int4 --quantize-method k-quant --quantize-block 64"
    " --target cuda --target tensorrt-rtx:sm86,sm89 --workspace 48 --optimization-level 1 --random-weights --slim --force"
)


def _asked(options: str, monkeypatch: pytest.MonkeyPatch) -> ExportRequest:
    asked: list[ExportRequest] = []
    monkeypatch.setattr(cli, "export", lambda request, report: asked.append(request))
    assert command.main(["opt-125m", "--out", "bundle", "--quiet", *options.split()]) == 0
    (request,) = asked
    return request


def test_every_option_reaches_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = ScheduleRequest(
        name="power", speedup=3.0, max_layers=20, min_layers=4, warmup_layers=2, span=30, alpha=0.9, max_variants=5,
        anchor=Anchor.ABSOLUTE,
    )  # fmt: skip
    assert _asked(ALL, monkeypatch) == ExportRequest(
        model="opt-125m", out=Path("bundle"), schedule=schedule, max_batch=7, max_length=99,
        targets=("cuda", "tensorrt-rtx:sm86,sm89"), dtype="bf16", quantize="int4", quantize_method="k-quant", quantize_block=64,
        builder=BuilderOptions(workspace_mib=48, optimization_level=1), random_weights=True, slim=True, force=True,
    )  # fmt: skip


def test_options_left_out_have_the_defaults_of_a_request_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _asked("", monkeypatch) == ExportRequest(model="opt-125m", out=Path("bundle"))


@pytest.mark.parametrize(
    ("options", "status", "printed"),
    [
        ("opt-6.7b --help", 0, "opt-6.7b --schedule linear"),
        ("opt-6.7b --taget", 2, "--taget; see skip-export --help\n"),
        ("opt-6.7b --target cpy", 2, "--target: target 'cpy' cannot be compiled"),
        ("opt-6.7b --target tensorrt-rtx:sm1", 2, "does not build for 'sm1'"),
        ("opt-6.7b --schedule liner", 2, "unknown schedule 'liner'; choose one of linear,"),
        ("opt-6.7b --schedule table:no.json", 2, "table no.json: cannot be read (no such file); name a JSON file"),
        ("opt-6.7b --alpha 0.9", 2, "--alpha 0.9; give a decay in (0, 1], and only with --schedule power"),
        ("opt-6.7b --dtype bf16", 2, "--dtype: bf16 on cpu: ONNX Runtime has no kernel for it; choose fp32"),
        ("opt-6.7b --max-batch 0", 2, "--max-batch: 0 is out of range"),
        ("./my-lama", 2, "./my-lama: is not a folder"),
        ("opt-6.7b --out .", 2, "exists and is not a bundle"),
    ],
)
def test_neither_help_nor_a_mistyped_option_waits_for_torch(options: str, status: int, printed: str) -> None:
    command = [*SKIP_EXPORT, "--out", "bundle", *options.split()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == status and printed in ended.stdout + ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("model", "first"),
    [("opt-125m", ["looking for opt-125m"]), ("org/model", ["looking for org/model", "org/model is asked for"])],
)
def test_progress_is_reported_from_the_start_of_an_export(
    model: str, first: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    monkeypatch.setattr(command, "_progress", lambda quiet: nullcontext(lambda what, done: reported.append(what)))
    monkeypatch.setattr(adapter_config, "fetch_config", lambda name: reported.append(f"{name} is asked for") or tmp_path)
    monkeypatch.setattr(cli, "export", lambda request, report: report("exporting", 0.5))
    assert command.main([model, "--out", "bundle", "--quiet"]) == 0
    assert reported == [*first, "importing torch and transformers", "exporting"]


@pytest.mark.parametrize(("anchor", "enough"), [(Anchor.GENERATED, 6), (Anchor.ABSOLUTE, 5)])
def test_a_schedule_ends_within_a_row_if_the_last_token_that_is_fed_has_its_fewest_layers(
    anchor: Anchor, enough: int, tmp_path: Path
) -> None:
    """Position 3 feeds the fourth token of a row; with anchor `generated` the fifth, because a prompt has at least one."""
    schedule = Schedule(name="table", num_layers=6, warmup_layers=1, layers=(6, 5, 4, 3), anchor=anchor)
    made, request = make_manifest(schedule, tmp_path), ExportRequest(model="m", out=tmp_path, random_weights=True)
    for length in (2, enough - 1, enough):
        limited = dataclasses.replace(made, limits=dataclasses.replace(made.limits, max_length=length))
        warned = [message for message in cli._warnings(limited, request) if "none reaches 3 layers" in message]
        assert len(warned) == (length < enough), length
