"""`skip-validate` as a user runs it."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from skipdecode.cli import validate as command
from skipdecode.cli.validate import main
from skipdecode.validation import parity
from skipdecode.validation import validate as validation
from skipdecode.validation.slo import parse_slo
from skipdecode.validation.workload import Request
from tests.runtime.validation.conftest import MODEL, QUICK, answer_here
from tests.zoo import Zoo


def test_everything_at_once_gives_tables_json_and_exit_0(
    trained: Path, eval_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.html"
    options = [
        "--reference", str(MODEL), "--eval", str(eval_file), "--speedup", "3", "--slo", "p99_token_ms<=10000",
        "--slo", "max_logit_error<=0.01", "--report", str(report),
    ]  # fmt: skip
    assert main([str(trained), *QUICK, *options, "--new-tokens", "20"]) == 0
    page = capsys.readouterr().out
    assert "all holds" in page and "against the reference" in page and "BLEU lost" in page
    assert "0.001 of the largest logit" in page
    assert report.stat().st_size > 400_000

    monkeypatch.setattr(parity, "_run_reference", answer_here)
    assert main([str(trained), *QUICK, *options[:8], "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (target,) = result["targets"]
    assert [row["name"] for row in target["quality"]] == ["full depth", "bundle's own", "3x"]
    assert result["holds"] and result["integrity"]["holds"] and len(target["parity"]) == len(result["bundle"]["variants"]) + 1


def test_an_objective_that_does_not_hold_is_named_and_exit_is_1(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trained), *QUICK, "--slo", "p50_token_ms<=0", "--slo", "tokens_per_s>=1", "--quiet"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("does not hold: p50_token_ms<=0 on cpu: measured ")


def test_a_percentile_says_how_many_measurements_it_is_of(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trained), *QUICK, "--slo", "p99_ttft_ms<=0", "--slo", "p50_ttft_ms<=100000"]) == 1
    captured = capsys.readouterr()
    assert re.fullmatch(r"does not hold: p99_ttft_ms<=0 on cpu: measured [\d.]+ \(of 1\)\n", captured.err)
    lines = captured.out.splitlines()
    assert any(re.search(r"p99_ttft_ms<=0 .*\(of 1\) +DOES NOT HOLD", line) for line in lines)
    assert any(re.search(r"p50_ttft_ms<=100000 +cpu +[\d.]+ +holds", line) for line in lines)
    title = next(index for index, line in enumerate(lines) if "workload, schedule against full depth" in line)
    batch, _, first, *_, steps, _, _, _, _, _ = lines[title + 2].split()
    assert (batch, first, steps) == ("1", "1", "5")  # one round of one first token and five more


@pytest.mark.parametrize(("found", "status"), [([True, True], 0), ([True, False], 1), ([False, True], 1)])
def test_a_variant_that_differs_from_the_reference_is_named_and_exit_is_1(
    found: list[bool], status: int, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = {"relative_error": 0.25, "median_error": 0.125, "bound": 0.1}
    by = (
        {"judged_by": "relative_error", "bound_of": "the largest logit"},
        {"judged_by": "median_error", "bound_of": "the median step's logits"},
    )
    rows = [{**judged, **by[index], "name": f"v{index}\x1b[2J", "holds": holds} for index, holds in enumerate(found)]
    for name in ("check_reference", "measure_cell", "measure_workload", "_gb_per_s"):
        monkeypatch.setattr(validation, name, lambda *_: None)
    monkeypatch.setattr(validation, "measure_parity", lambda *_: rows)
    assert main([str(trained), *QUICK, "--reference", "any", "--quiet"]) == status
    errors = ("0.25 of the largest logit", "0.12 of the median step's logits")
    told = [rf"v{index}\x1b[2J differs from the reference by {errors[index]}" for index, holds in enumerate(found) if not holds]
    assert capsys.readouterr().err.splitlines() == [f"does not hold: cpu {line} (at most 0.1)" for line in told]


@pytest.mark.parametrize(
    ("relative", "median", "told"),
    [
        (math.inf, math.nan, "gives logits that are NaN or infinite"),
        (math.nan, 0.1, "gives logits that are NaN or infinite"),
        (0.9, math.inf, "gives all tokens the same logit"),
    ],
)
def test_nan_and_infinite_errors_are_not_compared_with_a_bound(
    relative: float, median: float, told: str, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {"relative_error": relative, "median_error": median}
    row = {
        "name": "v4",
        **errors,
        "holds": False,
        "judged_by": "median_error",
        "bound": 1.25,
        "bound_of": "the median step's logits",
    }
    for name in ("check_reference", "measure_cell", "measure_workload", "_gb_per_s"):
        monkeypatch.setattr(validation, name, lambda *_: None)
    monkeypatch.setattr(validation, "measure_parity", lambda *_: [row])
    assert main([str(trained), *QUICK, "--reference", "any", "--quiet"]) == 1
    assert capsys.readouterr().err == f"does not hold: cpu v4 {told}\n"


def test_a_changed_file_fails_the_validation(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "engines"
    shutil.copytree(zoo.bundle("opt"), bundle)
    config = (bundle / "config.json").read_text()
    (bundle / "config.json").write_text(config.replace("0", "1", 1))
    assert main([str(bundle), *QUICK]) == 1
    assert "config.json: its contents are not what the manifest says" in capsys.readouterr().err


def test_random_weights_are_enough_for_speed(tmp_path: Path, zoo: Zoo) -> None:
    from skipdecode.exporter.export import ExportRequest, export

    export(ExportRequest(model=str(zoo.checkpoint("llama")), out=tmp_path / "b", random_weights=True, max_length=48))
    assert main([str(tmp_path / "b"), *QUICK, "--slo", "decode_gain>0"]) == 0


def test_an_earlier_run_is_compared(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validation, "_gb_per_s", lambda *_: 20.0)  # other work on this machine would change it
    assert main([str(trained), *QUICK, "--json"]) == 0
    (tmp_path / "old.json").write_text(capsys.readouterr().out)
    assert main([str(trained), *QUICK, "--baseline", str(tmp_path / "old.json"), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["baseline"]
    assert compared["differs"] == [] and len(compared["rows"]) == 7  # prefill, four variants, first token, token


@pytest.mark.parametrize("file", ["segment_001.bin", "head.onnx"])
def test_a_damaged_file_fails_the_validation_even_where_nothing_can_be_measured_with_it(
    file: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = shutil.copytree(trained, tmp_path / "engines")
    path = bundle / "targets" / "cpu" / file
    path.write_bytes(bytes(path.stat().st_size))
    assert main([str(bundle), *QUICK, "--json", "--report", str(tmp_path / "report.html")]) == 1
    said, told = capsys.readouterr()
    result = json.loads(said)
    assert not result["holds"] and result["integrity"]["what"].endswith("its contents are not what the manifest says")
    assert str(path) in result["integrity"]["what"]
    assert told.splitlines()[-1] == f"does not hold: {result['integrity']['what']}"
    if not result["targets"][0]["runs"]:
        assert file.partition(".")[0] in result["targets"][0]["why"]


def test_a_killed_run_is_resumed_where_it_was(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(validation, "measure_workload", killed)
        assert main([str(trained), *QUICK]) == 130
    with monkeypatch.context() as patch:
        patch.setattr(validation, "measure_cell", lambda *_: pytest.fail("measured again"))
        capsys.readouterr()
        assert main([str(trained), *QUICK, "--slo", "decode_gain>0"]) == 0  # a gate may be added
    captured = capsys.readouterr()
    assert "skip-validate: 3 measurements come from an earlier run that was stopped" in captured.err
    assert "3 measurements come from an earlier run that was stopped" in captured.out


def test_measurements_are_kept_until_the_result_is_written(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(zoo.bundle("opt")), *QUICK, "--report", "/dev/full"]) == 2
    assert "--report /dev/full: cannot be written (No space left on device)" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(validation, "measure_cell", lambda *_: pytest.fail("measured again"))
        assert main([str(zoo.bundle("opt")), *QUICK, "--report", str(tmp_path / "report.html")]) == 0
    monkeypatch.setattr(validation, "measure_cell", lambda *_: pytest.fail("measured again"))
    with pytest.raises(pytest.fail.Exception):
        main([str(zoo.bundle("opt")), *QUICK])


def test_a_run_is_not_resumed_when_the_same_files_have_changed(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, measured = tmp_path / "engines", []
    shutil.copytree(zoo.bundle("opt"), bundle)

    def killed(*_: Any) -> Any:
        measured.append("cell")
        raise KeyboardInterrupt

    monkeypatch.setattr(validation, "measure_cell", killed)
    monkeypatch.setattr(validation, "_gb_per_s", lambda *_: measured.append("bandwidth") or 1.0)
    assert main([str(bundle), *QUICK]) == 130
    assert main([str(bundle), *QUICK]) == 130
    assert measured == ["bandwidth", "cell", "cell"]  # the same files: resumed from the journal
    (bundle / "config.json").write_text((bundle / "config.json").read_text().replace("0", "1", 1))
    assert main([str(bundle), *QUICK]) == 130
    assert measured[3:] == ["bandwidth", "cell"]


def test_damage_done_while_a_run_was_stopped_fails_the_validation(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "engines"
    shutil.copytree(zoo.bundle("opt"), bundle)
    config = bundle / "config.json"
    stamp = config.stat()

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(validation, "measure_cell", killed)
        assert main([str(bundle), *QUICK]) == 130
    config.write_text(config.read_text().replace("0", "1", 1))
    os.utime(config, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as when a disk loses a bit
    assert main([str(bundle), *QUICK]) == 1
    assert "config.json: its contents are not what the manifest says" in capsys.readouterr().err


def test_every_option_reaches_the_request(eval_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[validation.ValidateRequest] = []
    result = {"resumed": 0, "integrity": {"holds": True}, "targets": [], "slo": [], "holds": True}
    monkeypatch.setattr(command, "validate", lambda request, progress: asked.append(request) or (result, lambda: None))
    (tmp_path / "lengths.jsonl").write_text('{"prompt_tokens": 8, "new_tokens": 6}')
    lists = ["--batch", "1,2", "--batch", "4", "--context", "8,16", "--speedup", "2,3", "--speedup", "4"]
    files = ["--workload", str(tmp_path / "lengths.jsonl"), "--eval", str(eval_file)]
    assert main(["engines", "--quiet", "--threads", "3", *lists, *files, "--new-tokens", "9"]) == 0
    (request,) = asked
    assert (request.batches, request.contexts, request.speedups) == ((1, 2, 4), (8, 16), (2, 3, 4))
    assert (request.threads, request.new_tokens, request.examples_path) == (3, 9, eval_file)
    assert request.requests == (Request(prompt_tokens=8, new_tokens=6),)
    assert main(["engines", "--quiet", "--slo", "p50_token_ms<=1"]) == 0, "by default there is a second token"
    assert asked[1] == validation.ValidateRequest(bundle=Path("engines"), slos=(parse_slo("p50_token_ms<=1"),))


def test_answers_that_are_cut_off_are_counted(trained: Path, eval_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trained), *QUICK, "--eval", str(eval_file)]) == 0
    assert len(re.findall(r"^(?:full depth|bundle's own) .* 2 of 2 *$", capsys.readouterr().out, re.MULTILINE)) == 2
    assert main([str(trained), *QUICK, "--new-tokens", "60", "--eval", str(eval_file), "--json"]) == 0
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    assert target["quality"][0]["cut_off"] == 0
