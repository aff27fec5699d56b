"""What skip-run asks of a generator, and what it prints of the result."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skipdecode.cli import run
from skipdecode.generate import Generator, load
from skipdecode.generation import Generation, Row, Timings
from skipdecode.prefill import PREFILL_CHUNK
from skipdecode.text import Tokenizer
from tests.runtime.test_text import BYTE_FALLBACK

ROWS = (Row(prompt_ids=[5], token_ids=[6, 7, 8], text="one"), Row(prompt_ids=[9], token_ids=[10, 11, 12]))
TIMINGS = Timings(load_s=1, prefill_s=0.5, decode_s=0.04, tokens_per_s=9)


@dataclasses.dataclass
class _Recorder:
    """Takes a generator's place: records how it was loaded and what it was asked, and gives a result made by hand."""

    rows: tuple[Row, ...] = ROWS
    tokenizer: Tokenizer | None = None
    loaded: dict[str, Any] = dataclasses.field(default_factory=dict)
    asked: dict[str, Any] = dataclasses.field(default_factory=dict)

    def load(self, *bundle: Path, **how: Any) -> _Recorder:
        self.loaded = inspect.signature(load).bind(*bundle, **how).arguments
        return self

    def generate(self, *prompts: Any, **how: Any) -> Generation:
        self.asked = inspect.signature(Generator.generate).bind(self, *prompts, **how).arguments
        streamer = self.asked.pop("streamer")
        for token in self.rows[0].token_ids if streamer else ():
            streamer.put(np.array([token]))
        if streamer:
            streamer.end()
        return Generation(sequences=self.rows, layers=(6, 1), timings=TIMINGS)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> _Recorder:
    made = _Recorder()
    monkeypatch.setattr(run, "load", made.load)
    return made


def test_every_option_reaches_its_argument(recorder: _Recorder) -> None:
    loading = ["--target", "cuda", "--threads", "3", "--prefill-chunk", "7", "--no-cuda-graphs"]
    sampling = ["--temperature", "0.7", "--top-k", "4", "--top-p", "0.9", "--seed", "11"]
    running = ["--token-ids", "1,2", "--token-ids", "3", "--max-new-tokens", "5", "--schedule", "full"]
    assert run.main(["engines", *loading, *sampling, *running]) == 0
    assert recorder.loaded == {
        "bundle": Path("engines"), "target": "cuda", "threads": 3, "prefill_chunk": 7, "cuda_graphs": False, "trace": None,
    }  # fmt: skip
    assert recorder.asked == {
        "self": recorder, "prompts": [[1, 2], [3]], "max_new_tokens": 5, "do_sample": True, "temperature": 0.7, "top_k": 4,
        "top_p": 0.9, "seed": 11, "schedule": "full",
    }  # fmt: skip


def test_the_default_is_64_greedy_tokens_with_the_bundles_schedule(recorder: _Recorder) -> None:
    assert run.main(["engines", "--prompt", "a"]) == 0
    assert recorder.loaded == {
        "bundle": Path("engines"), "target": None, "threads": None, "prefill_chunk": PREFILL_CHUNK, "cuda_graphs": True,
        "trace": None,
    }  # fmt: skip
    assert recorder.asked == {
        "self": recorder, "prompts": ["a"], "max_new_tokens": 64, "do_sample": False, "seed": 0, "schedule": None,
    }  # fmt: skip


def test_texts_and_files_are_prompts_in_the_order_given(recorder: _Recorder, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("b")
    second.write_text("d", encoding="utf-8-sig")  # with a byte order mark, as Windows editors write it
    assert run.main(["engines", "--prompt", "a", "--prompt-file", str(first), "--prompt", "c", "--prompt-file", str(second)]) == 0
    assert recorder.asked["prompts"] == ["a", "b", "c", "d"]
    assert run.main(["engines", "--prompt-file", str(second), "--prompt-file", str(first)]) == 0
    assert recorder.asked["prompts"] == ["d", "b"]


@pytest.mark.parametrize("given", [[], ["--prompt", "a", "--token-ids", "1"]], ids=["neither", "both"])
def test_prompts_are_either_texts_or_token_ids(given: list[str], recorder: _Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["engines", *given]) == 2
    line = "skip-run: give either text or token ids; use --prompt, --prompt-file or --token-ids\n"
    assert capsys.readouterr() == ("", line) and not recorder.loaded


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("1,,2", "''"),
        ("1,2,", "''"),
        (",", "''"),
        ("5.5", "'5.5'"),
        ("1, x", "'x'"),
        ("1\n2", r"'1\n2'"),
        ("9" * 5000, "'999999999999...9999999999999'"),
        (f"1,-{'9' * 4000}", "'-99999999999...9999999999999'"),
        (str(2**63), "'9223372036854775808'"),
    ],
)
def test_an_invalid_token_id_is_reported_in_one_short_line(
    given: str, said: str, recorder: _Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["engines", "--token-ids", given]) == 2
    assert capsys.readouterr() == (
        "",
        f"--token-ids: {said} is not a whole number below 2**63; write numbers separated by commas: 1,2,3\n",
    )


@pytest.mark.parametrize(("given", "ids"), [("", []), (" ", []), (" 1, 2 ", [1, 2]), ("-1", [-1])])
def test_other_token_ids_are_left_for_the_bundle_to_check(given: str, ids: list[int], recorder: _Recorder) -> None:
    assert run.main(["engines", f"--token-ids={given}"]) == 0
    assert recorder.asked["prompts"] == [ids]


@pytest.mark.parametrize(("option", "value"), [("temperature", 0.5), ("top_k", 3), ("top_p", 0.5)])
def test_one_sampling_option_is_enough_to_sample(option: str, value: float, recorder: _Recorder) -> None:
    assert run.main(["engines", "--prompt", "a", f"--{option.replace('_', '-')}", str(value)]) == 0
    assert recorder.asked["do_sample"] is True and recorder.asked[option] == value


def test_rows_of_a_batch_have_headings_and_steps_a_mean(recorder: _Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    told = "[2 decode steps, 3.5 layers a step, 20.00 ms a step]\n"
    assert run.main(["engines", "--token-ids", "5", "--token-ids", "9"]) == 0
    assert capsys.readouterr() == ("--- 0: one\n--- 1: 10,11,12\n", told)
    recorder.rows = ROWS[:1]
    assert run.main(["engines", "--token-ids", "5"]) == 0
    assert capsys.readouterr() == ("one\n", told)


def test_a_row_is_printed_as_it_arrives_to_its_last_byte(recorder: _Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    ids = [BYTE_FALLBACK._tokenizer.token_to_id(token) for token in ("\u2581h", "\u2581w", "<0xF0>", "<0x9F>")]
    recorder.tokenizer, recorder.rows = BYTE_FALLBACK, (Row(prompt_ids=[5], token_ids=ids, text="not printed again"),)
    assert run.main(["engines", "--prompt", "a", "--quiet"]) == 0
    assert capsys.readouterr() == ("h w" + "\N{REPLACEMENT CHARACTER}" * 2 + "\n", "")
