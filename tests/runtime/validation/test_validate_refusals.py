"""What `skip-validate` refuses: one line and exit status 2, before any long work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from skipdecode import generate
from skipdecode.cli.validate import main
from skipdecode.validation import validate as validation
from tests.runtime.validation.conftest import MODEL, QUICK
from tests.zoo import Zoo


@pytest.mark.parametrize("when", ["before it is loaded", "while it is loaded", "before it is hashed"])
def test_a_bundle_that_is_replaced_before_all_of_it_is_read_is_refused(
    when: str, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the other bundle would be measured under this one's name, or be called damaged."""
    bundle = shutil.copytree(zoo.bundle("opt"), tmp_path / "engines")
    module, name = {
        "before it is loaded": (validation, "_load"),
        "while it is loaded": (generate, "load_engines"),
        "before it is hashed": (validation, "_integrity"),
    }[when]
    step = getattr(module, name)

    def replaced(*given: Any) -> Any:
        bundle.rename(tmp_path / "old")
        shutil.copytree(zoo.bundle("llama"), bundle)
        return step(*given)

    monkeypatch.setattr(module, name, replaced)
    monkeypatch.setattr(validation, "_measure_target", lambda *_: pytest.fail("began to measure"))
    assert main([str(bundle), *QUICK]) == 2
    assert capsys.readouterr() == ("", f"{bundle}: was replaced while it was loaded; load it again\n")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--slo", "speed<=1"], "--slo: 'speed' is not measured; choose one of"),
        (["--slo", "bleu>=1"], "--slo: bleu is measured only with --eval; add --eval"),
        (["--slo", "decode_gain>=1", "--new-tokens", "1"], "--slo: decode_gain is measured only with --new-tokens 2; add"),
        (["--speedup", "2"], "--speedup: has no effect without --eval; add --eval"),
        (["--batch", "99"], "--batch: 99: the bundle takes 1..4; choose another"),
        (["--context", "4000"], "--context: 4000: the bundle takes 1..124"),
        (["--prompt-tokens", "100", "--new-tokens", "100"], "exceed the bundle's 128"),
        (["--report", "/nowhere/report.html"], "--report /nowhere/report.html: cannot be written"),
        (["--eval", "/nowhere.jsonl"], "/nowhere.jsonl: cannot be read"),
        (["--workload", "/nowhere.jsonl"], "/nowhere.jsonl: cannot be read"),
        (["--baseline", "/nowhere.json"], "--baseline /nowhere.json: cannot be read"),
        (["--reference", "/nowhere"], "/nowhere"),
        (["--target", "cuda"], "target 'cuda' is not in this bundle; choose from cpu"),
        (["--batch", "0"], "'0' is not a positive count"),
        (["--batch", "1,x"], "'x' is not a positive count"),
    ],
)
def test_bad_input_is_one_line_and_exit_2_before_any_long_work(
    options: list[str], says: str, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validation, "measure_cell", lambda *_: pytest.fail("began to measure"))
    monkeypatch.setattr(validation, "_integrity", lambda *_: pytest.fail("began to hash"))
    try:
        status = main([str(trained), *options])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2 and says in line


def test_a_speedup_that_the_model_cannot_reach_is_refused_before_any_long_work(
    trained: Path, eval_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validation, "_integrity", lambda *_: pytest.fail("began to hash"))
    assert main([str(trained), *QUICK, "--eval", str(eval_file), "--speedup", "2,99"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--speedup 99 cannot be reached by ")


def test_lengths_that_have_no_effect_with_a_workload_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"prompt_tokens": 8, "new_tokens": 6}')
    for option, says in (("--prompt-tokens", "with --workload;"), ("--new-tokens", "with --workload unless --eval is given;")):
        assert main([str(trained), "--workload", str(lengths), option, "8"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"{option}: has no effect {says} leave one of them out"


def test_a_reference_without_weights_is_refused_at_once(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(MODEL / "config.json", tmp_path)
    assert main([str(trained), "--reference", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}: holds no model.safetensors or pytorch_model.bin; name a checkpoint folder")


def test_a_bundle_too_short_to_measure_its_variants_is_refused(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validation, "max_context", lambda generator: 0)
    assert main([str(trained)]) == 2
    assert "a length of 128 leaves no room to measure" in capsys.readouterr().err


def test_a_bundle_without_targets_is_refused(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "engines"
    shutil.copytree(zoo.bundle("opt"), bundle)
    manifest = json.loads((bundle / "bundle.json").read_text())
    (bundle / "bundle.json").write_text(json.dumps({**manifest, "targets": []}))
    assert main([str(bundle), *QUICK]) == 2
    assert capsys.readouterr().err == f"{bundle}: target 'cpu' is not in this bundle; choose from none\n"


def test_a_reference_of_another_shape_is_refused_at_once(trained: Path, zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trained), "--reference", str(zoo.checkpoint("opt"))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--reference {zoo.checkpoint('opt')}: has num_layers 6, but the bundle " in line
    assert line.endswith("name the model that was exported")


def test_an_example_too_long_is_named(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "x " * 400, "references": ["y"]}))
    assert main([str(trained), "--eval", str(path)]) == 2
    assert "long.jsonl, example 1: its " in capsys.readouterr().err


@pytest.mark.parametrize(("prompt_ids", "says"), [([], "is empty"), ([5, 2048], "token id 2048 is outside the vocabulary")])
def test_an_example_that_the_bundle_cannot_run_is_named_before_any_long_work(
    prompt_ids: list[int], says: str, trained: Path, eval_file: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def encode(_: Any, text: str) -> list[int]:
        return [5] if "Mill" in text else prompt_ids

    monkeypatch.setattr(generate.Tokenizer, "encode", encode)
    monkeypatch.setattr(validation, "measure_cell", lambda *_: pytest.fail("measured first"))
    assert main([str(trained), *QUICK, "--eval", str(eval_file)]) == 2
    assert f"eval.jsonl, example 2's prompt: {says}; give" in capsys.readouterr().err


def test_text_without_a_tokenizer_is_refused(zoo: Zoo, eval_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(zoo.bundle("opt")), *QUICK, "--eval", str(eval_file)]) == 2
    assert "has no tokenizer" in capsys.readouterr().err
