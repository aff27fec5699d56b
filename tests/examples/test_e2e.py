"""The example's model end to end: exported with a 2x schedule, run with text, and compared with the reference."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import skipdecode
from skipdecode.exporter.reference import greedy_tokens

E2E = Path(__file__).parents[2] / "examples" / "e2e"
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("e2e") / "engines"
    command = [
        BIN / "skip-export",
        E2E / "model",
        "--schedule",
        "linear",
        "--speedup",
        "2",
        "--span",
        "48",
        "--out",
        out,
        "--quiet",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("", "")
    return out


def _prompts(count: int) -> list[str]:
    with (E2E / "sample.csv").open(encoding="utf-8", newline="") as lines:
        return [row["mr"] + " =>" for row in csv.DictReader(lines)][:count]


def test_real_prompts_give_the_references_tokens_with_and_without_the_schedule(bundle: Path) -> None:
    model = transformers.OPTForCausalLM.from_pretrained(E2E / "model", dtype="float32").eval()
    generator = skipdecode.load(bundle)
    prompts = generator.encode(_prompts(6))
    assert len({len(prompt) for prompt in prompts}) > 1
    for schedule in (generator.manifest.schedule, skipdecode.schedule.full_depth(24)):
        result = generator.generate(prompts, max_new_tokens=40, schedule=schedule)
        for prompt, row in zip(prompts, result.sequences, strict=True):
            expected = greedy_tokens(model, schedule, prompt, len(row.token_ids))[0]
            assert row.token_ids == expected
            assert row.finish_reason == ("stop" if expected[-1] == 2 else "length")


def test_tokens_of_a_prompt_are_those_of_transformers(bundle: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(E2E / "model")
    generator = skipdecode.load(bundle)
    for text in [*_prompts(20), "  spaces   and\ttabs\n", "Café £30 日本 🙂", "</s> inside"]:
        assert generator.encode(text) == [tokenizer(text)["input_ids"]]


def test_streamed_text_is_the_whole_text(bundle: Path) -> None:
    (prompt,) = _prompts(1)
    command = [str(BIN / "skip-run"), str(bundle), "--prompt", prompt]
    streamed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    whole = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True, timeout=60)
    row = json.loads(whole.stdout)["sequences"][0]
    assert streamed.stdout.strip() == row["text"].strip()
    assert row["finish_reason"] == "stop"
    assert "decode steps" in streamed.stderr


def test_a_prompt_file_is_read_literally_except_for_a_byte_order_mark(bundle: Path, tmp_path: Path) -> None:
    (path := tmp_path / "prompt.txt").write_bytes("\ufeffname[The Mill]\r\n =>\n".encode())
    done = subprocess.run(
        [str(BIN / "skip-run"), str(bundle), "--prompt-file", str(path), "--max-new-tokens", "1", "--json"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    wanted = skipdecode.load(bundle).encode("name[The Mill]\r\n =>\n")
    assert [row["prompt_ids"] for row in json.loads(done.stdout)["sequences"]] == wanted


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "either text or token ids"),
        (["--prompt", ""], "is empty"),
        (["--prompt", "a", "--token-ids", "1"], "either text or token ids"),
        (["--token-ids", "1,x"], "write numbers separated by commas"),
        (["--token-ids", "1", "--temperature", "0"], "above 0"),
        (["--prompt-file", "nowhere.txt"], "name a UTF-8 text file"),
        (["--prompt", "a", "--target", "cuda"], "choose from cpu"),
        (["--prompt", "a", "--max-new-tokens", "x"], "skip-run --help"),
        (["--prompt", "a " * 300], "exceed the bundle's 256"),
        (["--prompt", "a", "--profile", "/nowhere/trace.json"], "--profile /nowhere/trace.json: cannot be written"),
        (["--prompt", "a", "--prefill-chunk", "0"], "--prefill-chunk: 0 is not a positive count; choose 1 or more"),
    ],
)
def test_bad_arguments_give_one_line_and_exit_status_2(bundle: Path, arguments: list[str], says: str) -> None:
    done = subprocess.run(
        [str(BIN / "skip-run"), str(bundle), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert says in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--speedups", "1,50"], "--speedup 50 cannot be reached by 24 layers"),
        (["--out", "FILE"], "File exists"),
    ],
)
def test_training_refuses_what_would_fail_later_before_it_begins(arguments: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "trainset.csv").write_bytes((E2E / "sample.csv").read_bytes())
    given = [str(tmp_path / "trainset.csv") if argument == "FILE" else argument for argument in arguments]
    command = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--start", str(E2E / "model"), "--steps", "1"]
    done = subprocess.run(
        [sys.executable, str(E2E / "train.py"), *command, *given], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2 and says in done.stderr.splitlines()[-1], done.stderr
