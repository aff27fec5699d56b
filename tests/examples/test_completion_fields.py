"""The fields of a request and of its answer, one by one: defaults, edges, and what clients key on."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest

import skipdecode
from tests.examples.conftest import GOOD, PROMPT, Server

VOCABULARY = 2048  # of examples/e2e/model


def answered(server: Server, **asked: Any) -> dict[str, Any]:
    status, text = server.post(json.dumps({"prompt": PROMPT, **asked}).encode())
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


def text_of(server: Server, **asked: Any) -> str:
    return str(answered(server, **asked)["choices"][0]["text"])


def pieces(server: Server, **asked: Any) -> list[dict[str, Any]]:
    return server.streamed({"prompt": PROMPT, **asked})


def test_by_default_16_tokens_are_sampled_and_differently_for_each_request(server: Server) -> None:
    answers = [answered(server, ignore_eos=True) for _ in range(12)]
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {16}
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"length"}
    assert len({answer["choices"][0]["text"] for answer in answers}) > 1


def test_null_is_as_if_the_field_were_left_out(server: Server) -> None:
    names = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "user")
    answer = answered(server, **dict.fromkeys(names), ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16


def test_unsupported_fields_may_have_the_value_that_changes_nothing(server: Server) -> None:
    neutral = {"n": 1, "best_of": 1, "echo": False, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}}
    greedy = text_of(server, temperature=0)
    for suffix in (None, ""):
        assert text_of(server, temperature=0, **neutral, suffix=suffix, logprobs=None) == greedy
    assert text_of(server, temperature=0, stream_options={"include_obfuscation": False}) == greedy


def test_top_k_of_1_is_greedy_at_any_temperature(server: Server) -> None:
    greedy = text_of(server, temperature=0, max_tokens=40)
    assert {text_of(server, temperature=2, top_k=1, seed=seed, max_tokens=40) for seed in range(3)} == {greedy}
    assert {text_of(server, temperature=2, top_k=0, seed=seed, max_tokens=40) for seed in range(3)} != {greedy}


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        ({"temperature": 2}, {"temperature": 2.01}, "temperature is not in 0..2"),
        ({"top_p": 1}, {"top_p": 1.01}, "top_p is not in (0, 1]"),
        ({"max_tokens": 128}, {"max_tokens": 129}, "max_tokens is not in 1..128"),
        ({"stop": ["a", "b", "c", "d"]}, {"stop": ["a", "b", "c", "d", "e"]}, "stop is not a string or a list of at most 4"),
        ({"prompt": [5] * 128}, {"prompt": [5] * 129}, "prompt has 129 tokens, this server takes 128"),
        (
            {"prompt": [VOCABULARY - 1]},
            {"prompt": [VOCABULARY]},
            f"token id {VOCABULARY} is outside the vocabulary",
        ),
    ],
)
def test_a_limit_itself_is_served_and_what_is_beyond_it_is_refused(
    server: Server, good: dict[str, Any], bad: dict[str, Any], says: str
) -> None:
    answered(server, **{"max_tokens": 2, **good})
    status, text = server.post(json.dumps({**GOOD, **bad}).encode())
    assert (status, json.loads(text)["error"]["message"]) == (400, says)


def test_an_answer_says_when_it_was_made_and_has_its_own_id(server: Server) -> None:
    answers = [answered(server, max_tokens=2) for _ in range(3)]
    assert all(abs(answer["created"] - time.time()) < 60 for answer in answers)
    assert len({answer["id"] for answer in answers}) == 3


def test_choices_have_their_prompts_index_and_usage_counts_all(server: Server) -> None:
    prompts = [[5, 6, 7], [8], [9, 10]]
    asked: dict[str, Any] = {"prompt": prompts, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = answered(server, **asked)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 24, "total_tokens": 30}
    streamed = ["", "", ""]
    for choice in (choice for piece in pieces(server, **asked) for choice in piece["choices"]):
        streamed[choice["index"]] += choice["text"]
    assert streamed == [choice["text"] for choice in answer["choices"]]


def test_usage_is_streamed_only_when_asked_for(server: Server) -> None:
    assert all("usage" not in piece and piece["choices"] for piece in pieces(server, max_tokens=3))
    *_, last = pieces(server, max_tokens=3, ignore_eos=True, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3


def test_each_piece_of_a_stream_tells_its_usage_if_that_is_asked_for_too(server: Server) -> None:
    """As vLLM's do."""
    asked: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}
    both = {"include_usage": True, "continuous_usage_stats": True}
    *several, last = [piece["usage"] for piece in pieces(server, **asked, stream_options=both)]
    counts = [usage["completion_tokens"] for usage in several]
    assert counts == sorted(counts) and counts[0] > 0 and several[-1] == last and last["completion_tokens"] == 9
    assert not any("usage" in piece for piece in pieces(server, **asked, stream_options={"continuous_usage_stats": True}))


def test_metrics_count_the_tokens_the_steps_of_the_batch_and_the_layers_of_its_deepest_row(server: Server, bundle: Path) -> None:
    names = ("tokens_total", "decode_steps_total", "layers_total", "first_token_seconds_count", "rows_completed_total")
    layers = skipdecode.load(bundle).generate(PROMPT, max_new_tokens=20, ignore_eos=True).layers
    server.until("rows_running", 0)
    before = [server.metric(name) for name in names]
    answered(server, prompt=[PROMPT] * 3, max_tokens=20, ignore_eos=True)
    server.until("rows_completed_total", before[-1] + 3)
    assert [server.metric(name) - old for name, old in zip(names, before, strict=True)] == [60, 19, sum(layers), 3, 3]


def test_a_client_that_is_refused_for_now_is_told_when_to_retry(bundle: Path) -> None:
    narrow = Server(bundle, "--rows", "1", "--queue", "64")
    asked = {"prompt": [PROMPT] * 64, "max_tokens": 128, "ignore_eos": True}
    with narrow.client.completions.create(model="model", stream=True, extra_body=asked, prompt=PROMPT):
        with pytest.raises(openai.RateLimitError) as refused:
            narrow.client.completions.create(model="model", prompt=[PROMPT] * 64)
        assert (refused.value.status_code, refused.value.response.headers["Retry-After"]) == (429, "1")
        with pytest.raises(openai.BadRequestError) as wrong:
            narrow.client.completions.create(model="model", prompt="")
    assert "Retry-After" not in wrong.value.response.headers
    assert narrow.stop() == 0


def test_rows_are_capped_by_the_bundle_longer_prompts_leave_fewer_new_tokens_and_sigint_ends_it(bundle: Path) -> None:
    wide = Server(bundle, "--rows", "1000", "--max-prompt-tokens", "200")
    assert answered(wide, prompt=[5] * 200, max_tokens=56, ignore_eos=True)["usage"]["completion_tokens"] == 56
    status, text = wide.post(json.dumps({"prompt": [5], "max_tokens": 57}).encode())
    assert status == 400 and "max_tokens is not in 1..56" in text
    assert wide.stop(signal.SIGINT) == 0


def test_a_text_may_also_be_too_long_in_bytes(bundle: Path) -> None:
    short = Server(bundle, "--max-prompt-bytes", "8")
    assert short.post(json.dumps({"prompt": "name \u00e9a", "max_tokens": 2}).encode())[0] == 200
    status, text = short.post(json.dumps({"prompt": "name \u00e9ab"}).encode())
    assert (status, json.loads(text)["error"]["message"]) == (400, "prompt has 9 bytes, this server takes 8")
    assert short.stop() == 0
