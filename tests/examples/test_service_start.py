"""How the C++ service starts: its options, and bundles whose tokenizer is missing, damaged or of no use in C++."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from tests.cpp.conftest import replacing
from tests.examples.conftest import GOOD, PROMPT, SERVICE, Server


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["nowhere"], "nowhere: there is no bundle.json here; name the folder that skip-export wrote"),
        ([], "name a bundle; see skd_service --help"),
        (["a", "--port", "x"], "--port: 'x' is not a count"),
        (["a", "--port", "70000"], "--port: 70000 is out of range; choose 0..65535"),
        (["a", "--connections", "0"], "--connections: 0 is out of range; choose 1..4096"),
        (["a", "--queue", "0"], "--queue: 0 is out of range; choose 1.."),
        (["a", "--timeout-s", "0"], "--timeout-s: 0 is out of range; choose 1.."),
        (["BUNDLE", "--threads", "100000"], "--threads: 100000 is out of range; choose 1..1024, or 0: one a core"),
        (["a", "--rows"], "--rows: needs a value"),
        (["a", "--schedule", "linear"], "--schedule: 'linear' is not known; choose full, or leave it out"),
        (["a", "--what", "1"], "--what: unknown option"),
        (["a", "--what"], "--what: unknown option"),
        (["--what"], "--what: unknown option"),
        (["a", "-p", "1"], "-p: unknown option"),
        (["BUNDLE", "--max-prompt-tokens", "9999"], "--max-prompt-tokens: 9999 prompt tokens leave no room in the bundle's 256"),
        (["BUNDLE", "--max-new-tokens", "200"], "--max-new-tokens: 200 new tokens: prompts leave 128; choose fewer, --max-"),
        (["BUNDLE", "--genai-library", "/nowhere.so"], "set LD_LIBRARY_PATH, or name it in --genai-library\n"),
        (["BUNDLE", "--onnxruntime-library", "/nowhere.so"], "ONNX Runtime cannot be loaded (/nowhere.so"),
        (["BUNDLE", "--onnxruntime-library", "/nowhere.so"], "set LD_LIBRARY_PATH, or name it in --onnxruntime-library\n"),
        (["BUNDLE", "--onnxruntime-library", "/threads: skd_tokenizer_create"], "(/threads: skd_tokenizer_create: cannot open"),
        (["max_prompt_tokens"], "max_prompt_tokens: there is no bundle.json here"),
        (["BUNDLE", "--target", "cuda"], "target 'cuda' is not in this bundle; choose from cpu"),
        (["BUNDLE", "--target", ""], "target '' is not in this bundle; choose from cpu"),
    ],
)
def test_bad_options_give_one_line_and_exit_status_2(bundle: Path, options: list[str], says: str) -> None:
    command = [str(SERVICE), *(str(bundle) if option == "BUNDLE" else option for option in options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert says in done.stderr


@pytest.mark.parametrize("options", [["--help"], ["-h"], ["nowhere", "--help"], ["nowhere", "--port", "1", "--help"]])
def test_help_is_printed_wherever_it_is_asked_for(options: list[str]) -> None:
    done = subprocess.run([SERVICE, *options], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: skd_service BUNDLE [options]\n")


def test_a_bundle_that_is_replaced_before_its_tokenizer_is_read_is_not_served_without_one(bundle: Path, tmp_path: Path) -> None:
    mine, other = (shutil.copytree(bundle, tmp_path / name) for name in ("engines", "other"))
    library = replacing(mine, other, "libonnxruntime-genai.so", tmp_path)
    command = [str(SERVICE), str(mine), "--port", "0", "--genai-library", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{mine}: was replaced since it was loaded; load it again\n"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tokenizer.json", "tokenizer.json: cannot be read ("),
        ("tokenization.json", "tokenization.json cannot be read ("),
    ],
)
def test_a_bundle_with_a_damaged_tokenizer_is_not_served_without_one(bundle: Path, tmp_path: Path, name: str, says: str) -> None:
    damaged = shutil.copytree(bundle, tmp_path / "v1: was replaced by v2")
    (damaged / name).write_bytes(b'"' + b"a" * ((damaged / name).stat().st_size - 1))
    done = subprocess.run([SERVICE, damaged, "--port", "0"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert says in done.stderr and "export the model again" in done.stderr and len(done.stderr) < 1000


def _other_sample(text: str) -> str:
    tokenization = json.loads(text)
    tokenization["samples"][3]["ids"][0] += 1
    return json.dumps(tokenization)


def _with(text: str, value: str) -> str:
    """The JSON object with one more setting, such as Python's json writes and reads."""
    return text.rstrip()[:-1] + f', "more": {value}}}'


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("tokenization.json", _other_sample, "differently from Hugging Face"),
        ("tokenizer_config.json", lambda text: _with(text, "Infinity"), "the tokenizer failed ("),
        ("tokenizer_config.json", lambda text: _with(text, "NaN"), "the tokenizer failed ("),
        ("tokenizer_config.json", lambda text: _with(text, r'"\ud800"'), "the tokenizer failed ("),
        ("genai_config.json", lambda text: text[:-2], "the tokenizer failed ("),
    ],
)
def test_a_tokenizer_that_genai_cannot_read_or_reads_differently_is_reported_and_token_ids_are_served(
    bundle: Path, tmp_path: Path, name: str, change: Callable[[str], str], reason: str
) -> None:
    other = shutil.copytree(bundle, tmp_path / "engines")
    text = change((other / name).read_text())
    (other / name).write_text(text)
    manifest = json.loads((other / "bundle.json").read_text())
    (entry,) = [file for file in manifest["files"] if file["path"] == name]
    entry["size"] = len(text)
    (other / "bundle.json").write_text(json.dumps(manifest))
    ids = Server(other)
    assert json.loads(ids.post(json.dumps({"prompt": [5, 6], "max_tokens": 2}).encode())[1])["choices"][0]["token_ids"]
    assert "this model has no tokenizer" in ids.post(json.dumps(GOOD).encode())[1]
    assert ids.process.stderr is not None
    ids.ask_to_end()
    says = ids.process.stderr.read()
    assert reason in says and says.endswith("(this server takes and gives token ids only)\n")
    assert ids.stop() == 0


def test_a_bundle_without_a_tokenizer_takes_and_gives_token_ids(bundle: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(bundle, tmp_path / "v1: was replaced by v2")
    manifest = json.loads((bare / "bundle.json").read_text())
    manifest["files"] = [file for file in manifest["files"] if "token" not in file["path"]]
    (bare / "bundle.json").write_text(json.dumps(manifest))
    for path in bare.glob("*token*"):
        path.unlink()
    expected = skipdecode.load(bundle).generate(PROMPT, max_new_tokens=20).sequences[0]
    ids = Server(bare)
    asked: dict[str, Any] = {"prompt": list(expected.prompt_ids), "max_tokens": 20, "temperature": 0}
    (choice,) = json.loads(ids.post(json.dumps(asked).encode())[1])["choices"]
    assert (choice["token_ids"], choice["text"]) == (list(expected.token_ids), "")
    pieces = ids.streamed(asked)
    assert [id_ for piece in pieces for choice in piece["choices"] for id_ in choice["token_ids"]] == list(expected.token_ids)
    status, text = ids.post(json.dumps({**asked, "stop": "."}).encode())
    assert status == 400 and "stop needs a tokenizer, which this model lacks: leave it out" in text
    assert ids.stop() == 0
