"""The C++ service as its users meet it: the `openai` package, curl, and requests that ask for too much."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

import skipdecode
from tests.examples.conftest import GOOD, PROMPT, SERVICE, Server


def test_the_openai_client_gets_pythons_text(server: Server, bundle: Path) -> None:
    expected = skipdecode.load(bundle).generate(PROMPT, max_new_tokens=40).sequences[0]
    answer = server.client.completions.create(model="model", prompt=PROMPT, max_tokens=40, temperature=0)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens == len(expected.prompt_ids)


def test_at_full_depth_the_service_gives_the_baselines_text(bundle: Path) -> None:
    python = skipdecode.load(bundle)
    expected = python.generate(PROMPT, max_new_tokens=40, schedule="full").sequences[0].text
    assert expected != python.generate(PROMPT, max_new_tokens=40).sequences[0].text
    running = Server(bundle, "--schedule", "full")
    answer = running.client.completions.create(model="model", prompt=PROMPT, max_tokens=40, temperature=0)
    assert answer.choices[0].text == expected
    assert running.metric("layers_total") == 24 * running.metric("decode_steps_total")
    assert running.stop() == 0


def test_the_service_sends_no_telemetry_of_onnx_runtime(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library stores what it is going to send in the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("CI", "GITHUB_ACTIONS", "ORT_DISABLE_TELEMETRY"):
        monkeypatch.delenv(name, raising=False)
    running = Server(bundle)
    assert running.post(json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode())[0] == 200
    assert running.stop() == 0
    assert list(tmp_path.iterdir()) == []


def test_the_openai_client_finds_the_model_by_its_name_and_no_other(server: Server) -> None:
    assert server.client.models.retrieve("model") == server.client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="model 'gpt-4' is not served here; choose model"):
        server.client.models.retrieve("gpt-4")


def test_a_long_path_does_not_end_a_service_whose_threads_have_small_stacks(bundle: Path, tmp_path: Path) -> None:
    """With `ulimit -s unlimited` they have 2 MiB."""
    (program := tmp_path / "service").write_text(f'#!/bin/sh\nulimit -s 1024\nexec {SERVICE} "$@"\n')
    program.chmod(0o700)
    running = Server(bundle, program=program)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        running.get(f"/v1/models/{'a' * 7000}")
    assert running.stop() == 0


def test_text_streams_in_pieces_that_add_up(server: Server) -> None:
    whole = server.client.completions.create(model="model", prompt=PROMPT, max_tokens=40, temperature=0)
    counts = []
    for _ in range(10):
        stream = server.client.completions.create(
            model="model", prompt=PROMPT, max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        pieces = list(stream)
        counts.append(len(pieces))
        assert "".join(choice.text for piece in pieces for choice in piece.choices) == whole.choices[0].text
        assert [choice.finish_reason for piece in pieces for choice in piece.choices][-1] == "stop"
        assert pieces[-1].usage == whole.usage
    assert max(counts) > 5  # on a busy machine tokens wait for each other and are sent together


@pytest.mark.parametrize("seed", [11, -1, -(2**63), 2**64 - 1])
def test_a_seed_gives_pythons_sampled_tokens(server: Server, bundle: Path, seed: int) -> None:
    sampled = skipdecode.load(bundle).generate(PROMPT, max_new_tokens=30, do_sample=True, temperature=0.9, top_p=0.9, seed=seed)
    answer = server.client.completions.create(model="model", prompt=PROMPT, max_tokens=30, temperature=0.9, top_p=0.9, seed=seed)
    assert answer.choices[0].text == sampled.sequences[0].text


def test_equal_prompts_of_one_request_are_sampled_independently_as_in_python(server: Server, bundle: Path) -> None:
    prompts = [PROMPT] * 3
    sampled = skipdecode.load(bundle).generate(prompts, max_new_tokens=30, do_sample=True, temperature=1.5, seed=11)
    answer = server.client.completions.create(model="model", prompt=prompts, max_tokens=30, temperature=1.5, seed=11)
    texts = [choice.text for choice in answer.choices]
    assert texts == [row.text for row in sampled.sequences] and len(set(texts)) == 3


def test_bytes_that_are_not_text_lose_nothing_and_stop_strings_after_them_are_seen(server: Server, bundle: Path) -> None:
    python = skipdecode.load(bundle)
    behind = 0
    for seed in range(1, 50):
        sampled = python.generate(PROMPT, max_new_tokens=40, do_sample=True, temperature=2.0, seed=seed).sequences[0].text
        asked = {"model": "model", "prompt": PROMPT, "max_tokens": 40, "temperature": 2.0, "seed": seed}
        assert server.client.completions.create(**asked).choices[0].text == sampled
        _, invalid, rest = sampled.partition("\ufffd")
        if (stop := rest.strip("\ufffd")[1:4]) and stop not in sampled[: sampled.index(invalid)]:
            behind += 1
            cut = server.client.completions.create(**asked, stop=stop).choices[0]
            assert (cut.text, cut.finish_reason) == (sampled[: sampled.index(stop)], "stop")
    assert behind > 3


def test_several_prompts_and_token_ids_are_answered_in_order(server: Server, bundle: Path) -> None:
    prompts = [PROMPT, "name[Cotto] =>", "name[Clowns], eatType[pub] =>"]
    expected = skipdecode.load(bundle).generate(prompts, max_new_tokens=25)
    answer = server.client.completions.create(model="model", prompt=prompts, max_tokens=25, temperature=0)
    assert [choice.text for choice in answer.choices] == [row.text for row in expected.sequences]
    ids = [row.prompt_ids for row in expected.sequences]
    by_ids = server.client.completions.create(model="model", prompt=ids, max_tokens=25, temperature=0)
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in answer.choices]


def test_a_stop_string_ends_the_text_before_it_even_across_tokens(server: Server) -> None:
    whole = server.client.completions.create(model="model", prompt=PROMPT, max_tokens=40, temperature=0).choices[0].text
    stop = whole[9:14]
    cancelled, completed = server.metric("rows_cancelled_total"), server.metric("rows_completed_total")
    cut = server.client.completions.create(model="model", prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop, "zzz"])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    pieces = server.client.completions.create(model="model", prompt=PROMPT, max_tokens=40, temperature=0, stop=stop, stream=True)
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == cut.choices[0].text
    server.until("rows_completed_total", completed + 2)
    assert server.metric("rows_cancelled_total") == cancelled


def test_curl_gets_models_health_metrics_and_a_completion(server: Server) -> None:
    def curl(*arguments: str) -> str:
        return subprocess.run(["curl", "-sS", *arguments], check=True, capture_output=True, text=True, timeout=30).stdout

    assert json.loads(curl(f"{server.url}/health")) == {"status": "ok"}
    assert [model["id"] for model in json.loads(curl(f"{server.url}/v1/models"))["data"]] == ["model"]
    body = json.dumps({"prompt": PROMPT, "max_tokens": 5, "temperature": 0})
    assert json.loads(curl(f"{server.url}/v1/completions", "-d", body))["object"] == "text_completion"
    streamed = curl("-N", f"{server.url}/v1/completions", "-d", json.dumps({**json.loads(body), "stream": True}))
    assert streamed.endswith("data: [DONE]\n\n")
    page = curl(f"{server.url}/metrics")
    assert "# TYPE skipdecode_tokens_total counter" in page and 'first_token_seconds_bucket{le="+Inf"}' in page


_BAD: list[tuple[Any, int, str]] = [
    (b"", 400, "the body is not valid JSON"),
    (b"{", 400, "the body is not valid JSON"),
    (b"[1]", 400, "the body is not a JSON object"),
    (json.dumps(GOOD).encode() + b"\0 and more", 400, "the body is not valid JSON"),
    (b'{"prompt": "\xff"}', 400, "the body is not valid JSON"),
    (b"[" * 100_000, 400, "the body is nested too deeply"),
    (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", 400, "the body is nested too deeply"),
    (b'{"prompt": [5, 6], "stop": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", 400, "the body is nested too deeply"),
    (b'{"prompt": [' + b"{}," * 9999, 400, "the body has more than 2128 values: this server takes 16 prompts of 128 tokens"),
    ({"max_tokens": 4}, 400, "prompt is missing"),
    ({"prompt": ""}, 400, "prompt is empty"),
    ({"prompt": []}, 400, "prompt is empty"),
    ({"prompt": {}}, 400, "prompt is not a string, a list of token ids"),
    ({"prompt": [[]]}, 400, "prompt is not a string"),
    ({"prompt": "a\0b"}, 400, "NUL"),
    ({"prompt": "word " * 500}, 400, "tokens, this server takes 128"),
    ({"prompt": " " * 4097}, 400, "prompt has 4097 bytes, this server takes 4096"),
    ({"prompt": [5, 99999]}, 400, "token id 99999 is outside the vocabulary"),
    ({"prompt": [2**63]}, 400, "token id 9223372036854775808 is outside the vocabulary"),
    ({"prompt": [5, -1]}, 400, "token id -1 is outside the vocabulary"),
    ({"prompt": ["a"] * 17}, 400, "at most 16 prompts per request"),
    ({**GOOD, "max_tokens": 0}, 400, "max_tokens is not in 1..128"),
    ({**GOOD, "max_tokens": 10**30}, 400, "max_tokens is not a whole number"),
    ({**GOOD, "max_tokens": "4"}, 400, "max_tokens is not a whole number"),
    ({**GOOD, "temperature": -1}, 400, "temperature is not in 0..2"),
    ({**GOOD, "top_p": 0}, 400, "top_p is not in (0, 1]"),
    ({**GOOD, "seed": 2**64}, 400, "seed is not a whole number, -2**63 to 2**64-1"),
    ({**GOOD, "stop": ""}, 400, "stop holds an empty string"),
    ({**GOOD, "stop": ["a", ""]}, 400, "stop holds an empty string"),
    ({**GOOD, "stop": ["a", 5]}, 400, "stop holds something that is not a string"),
    ({**GOOD, "stop": ["a"] * 5}, 400, "at most 4"),
    ({**GOOD, "user": 5}, 400, "user is not a string"),
    ({**GOOD, "stream_options": 5}, 400, "stream_options is not an object"),
    ({**GOOD, "stream_options": [1]}, 400, "stream_options is not an object"),
    ({**GOOD, "stream_options": {"include_usages": True}}, 400, "unknown field 'stream_options.include_usages'"),
    ({**GOOD, "stream_options": {"include_obfuscation": True}}, 400, "stream_options.include_obfuscation is not supported"),
    ({**GOOD, "n": 2}, 400, "n is not supported by this server"),
    ({**GOOD, "logprobs": 3}, 400, "logprobs is not supported"),
    ({**GOOD, "tempreature": 1}, 400, "unknown field 'tempreature'"),
    ({**GOOD, "model": "gpt\0-4"}, 404, "model 'gpt\0-4' is not served here; choose model"),
    ({**GOOD, "model": "gpt-4"}, 404, "model 'gpt-4' is not served here; choose model"),
    (b'{"prompt": "' + b"a" * (1 << 20) + b'"}', 413, "larger than 1 MiB"),
]


@pytest.mark.parametrize(("body", "status", "says"), _BAD)
def test_a_bad_request_gets_its_status_and_one_line_and_others_are_served(
    server: Server, body: Any, status: int, says: str
) -> None:
    found, text = server.post(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert (found, says in json.loads(text)["error"]["message"]) == (status, True), text
    assert server.post(json.dumps(GOOD).encode())[0] == 200


def test_the_first_piece_of_many_prompts_does_not_wait_for_those_in_the_queue(bundle: Path) -> None:
    narrow = Server(bundle, "--rows", "1", "--queue", "64")
    asked = {"prompt": [PROMPT] * 64, "max_tokens": 128, "ignore_eos": True, "temperature": 0}
    with narrow.client.completions.create(model="model", stream=True, extra_body=asked, prompt=PROMPT) as stream:
        assert [choice.index for choice in next(iter(stream)).choices] == [0]
        assert narrow.metric("rows_completed_total") < 8
    assert narrow.stop() == 0


def test_another_path_or_method_is_404(server: Server) -> None:
    assert server.post(b"{}", "/v1/chat/completions")[0] == 404
    with pytest.raises(urllib.error.HTTPError, match="404"):
        server.get("/v1/completions")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_row(server: Server, stream: bool) -> None:
    before = server.metric("rows_cancelled_total")
    body = json.dumps({"prompt": PROMPT, "max_tokens": 128, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    cancelled = 0
    for _ in range(20):  # a row may end by itself before the server notices
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(head.encode() + body)
            connection.recv(100)
        server.until("rows_running", 0)
        cancelled = int(server.metric("rows_cancelled_total") - before)
        if cancelled:
            break
    assert cancelled == 1


def test_more_than_the_queue_holds_is_429_and_the_rest_is_served(server: Server) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "temperature": 0}).encode()
    with ThreadPoolExecutor(60) as pool:
        answers = list(pool.map(lambda _: server.post(body), range(60)))
    statuses = [status for status, _ in answers]
    assert set(statuses) == {200, 429}
    assert len({json.loads(text)["choices"][0]["text"] for status, text in answers if status == 200}) == 1
    assert "the queue is full" in next(text for status, text in answers if status == 429)
    assert server.metric("rows_rejected_total") >= statuses.count(429)


def test_a_request_that_takes_too_long_ends_with_what_it_has_and_one_that_has_nothing_is_told_to_retry(bundle: Path) -> None:
    impatient = Server(bundle, "--rows", "1", "--queue", "200", "--timeout-s", "2")
    long = {"prompt": [[5]] * 199, "max_tokens": 128, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        cut = pool.submit(impatient.post, json.dumps(long).encode())
        impatient.until("rows_running", 1)
        behind = pool.submit(impatient.client.completions.create, model="model", prompt=PROMPT)
        impatient.until("rows_accepted_total", 200)
        impatient.process.send_signal(signal.SIGSTOP)  # while all but one row wait
        time.sleep(2.2)
        impatient.process.send_signal(signal.SIGCONT)
        refused = behind.exception()
        status, text = cut.result()
    assert isinstance(refused, openai.InternalServerError)
    assert (refused.status_code, refused.response.headers["Retry-After"]) == (503, "1")
    assert "no token came in time: try again, or send a shorter prompt" in refused.message
    choices = json.loads(text)["choices"]
    late = [choice["text"] for choice in choices if choice["finish_reason"] == "timeout"]
    assert status == 200 and any(late) and {choice["finish_reason"] for choice in choices} <= {"length", "timeout"}
    assert impatient.metric("rows_timed_out_total") == len(late) + 1
    assert impatient.stop() == 0


def test_sigterm_finishes_what_runs_and_refuses_what_is_new(bundle: Path) -> None:
    ending = Server(bundle, "--rows", "1")
    body = {"prompt": PROMPT, "max_tokens": 128, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(ending.post, json.dumps(body).encode()) for _ in range(6)]
        while ending.metric("rows_running") == 0:
            time.sleep(0.005)
        ending.ask_to_end()
        answers = [future.result() for future in running]
    assert {status for status, _ in answers} <= {200, 503}
    assert any(status == 200 for status, _ in answers)
    for status, text in answers:
        if status == 200:
            assert json.loads(text)["usage"]["completion_tokens"] == 128
    assert ending.stop() == 0
