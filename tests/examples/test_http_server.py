"""The C++ service's connections: what a request may be, how long it may take to arrive, and what shutdown waits for."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import itertools
import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cpp.conftest import SANITIZERS
from tests.examples.conftest import BUILD, GOOD, PROMPT, Server


def _curl(*arguments: str) -> tuple[int, str]:
    """Status and body of an answer."""
    command = ["curl", "-sS", "-w", "\n%{http_code}", *arguments]
    done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    text, _, status = done.stdout.decode().rpartition("\n")
    return int(status), text


def test_curls_default_content_type_is_served_with_bodies_of_any_size(server: Server, tmp_path: Path) -> None:
    (tmp_path / "body.json").write_text(json.dumps(GOOD) + " " * 100_000)
    status, text = _curl(f"{server.url}/v1/completions", "-d", f"@{tmp_path / 'body.json'}")
    assert (status, json.loads(text)["object"]) == (200, "text_completion")


def test_a_chunked_body_is_measured_as_it_arrives(server: Server, tmp_path: Path) -> None:
    chunked = ["-H", "Transfer-Encoding: chunked", "-H", "Content-Type: application/json", f"{server.url}/v1/completions"]
    (tmp_path / "small").write_bytes(json.dumps(GOOD).encode())
    assert _curl(*chunked, "--data-binary", f"@{tmp_path / 'small'}")[0] == 200
    (tmp_path / "large").write_bytes(b'{"prompt": "' + b"a" * (64 << 20) + b'"}')
    before = _resident_bytes(server.process.pid)
    status, text = _curl(*chunked, "--data-binary", f"@{tmp_path / 'large'}")
    assert (status, json.loads(text)["error"]["message"]) == (413, "the body is larger than 1 MiB")
    for path, method in (("/elsewhere", "POST"), ("/v1/completions", "PUT")):  # no handler reads these bodies
        assert _curl(*chunked[:-1], server.url + path, "-X", method, "--data-binary", f"@{tmp_path / 'large'}")[0] == 404
    assert _resident_bytes(server.process.pid) - before < 16 << 20


def _resident_bytes(process: int) -> int:
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())[1]) << 10  # type: ignore[index]


def test_a_compressed_or_multipart_body_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    packed = ["-H", "Content-Encoding: gzip", "--data-binary", f"@{tmp_path / 'body'}"]
    for sent in (
        packed,
        ["-F", f"prompt=@{tmp_path / 'body'}"],
        ["-d", "{}", "-H", "Transfer-Encoding: gzip", "-H", "Content-Length:"],
    ):
        status, text = _curl(f"{server.url}/v1/completions", *sent)
        assert (status, json.loads(text)["error"]["message"]) == (415, "the body is compressed, or multipart: send plain JSON")


def test_codings_are_read_in_any_case(server: Server) -> None:
    body = json.dumps(GOOD).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Encoding: Identity\r\n"
    assert _sent(server, head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))[0] == 200
    assert _sent(server, head + b"Transfer-Encoding: Chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))[0] == 200


def _sent(server: Server, data: bytes) -> tuple[int, str]:
    """Send bytes, and return the status and the whole body of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(data)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read().decode()


@pytest.mark.parametrize(
    ("data", "status", "says"),
    [
        (b"GET /health HTTP/9.9\r\n\r\n", 400, "the request's head is not HTTP/1.1, or a line of it is longer than 8 KiB"),
        (b"GET /health HTTP/1.1\r\nA: " + b"b" * 9000 + b"\r\n\r\n", 400, "a line of it is longer than 8 KiB"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 414, "the path is longer than 8 KiB"),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 414, "the path is longer than 8 KiB"),
        (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 20_000, 431, "the request's head is longer than 64 KiB, or has more than"),
        (b"GET /health HTTP/1.1\r\nContent-Length: abc\r\n\r\n", 400, "Content-Length 'abc' is not a number of bytes"),
        (b"GET /health HTTP/1.1\r\nContent-Length: +5\r\n\r\n", 400, "Content-Length '+5' is not a number of bytes"),
        (b"GET /health HTTP/1.1\r\nContent-Length: 1,2\r\n\r\n", 400, "Content-Length '1,2' is not a number of bytes"),
        (
            b"GET /health HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            400,
            "Content-Length is given more than once",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
            400,
            "Content-Length and Transfer-Encoding are both given",
        ),
        (b"GET /health HTTP/1.1\r\nContent-Length : 1\r\n\r\n", 400, "a header's name contains a space"),
        (b"GET /health HTTP/1.1\r\n Content-Length: 1\r\n\r\n", 400, "a header's name contains a space"),
        (
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
            400,
            "Transfer-Encoding is given more than once",
        ),
        (b"GET /health HTTP/1.1\r\nRange: bytes=x\r\n\r\n", 416, "the Range header cannot be followed"),
        (b"PUT /health HTTP/1.1\r\nContent-Length: 9\r\n\r\n", 404, "PUT /health is not served"),
        (b"POST /v1/completions HTTP/1.1\r\n\r\n", 400, "the body is not valid JSON"),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", 400, "the body is malformed or incomplete"),
    ],
)
def test_what_http_forbids_is_refused_with_its_reason(server: Server, data: bytes, status: int, says: str) -> None:
    found, text = _sent(server, data)
    assert (found, says in json.loads(text)["error"]["message"]) == (status, True), text


def test_a_body_announced_as_too_large_or_without_a_number_is_not_waited_for(bundle: Path) -> None:
    patient = Server(bundle, "--arrival-s", "100")
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: "
    for length in (b"1048577", b"1" * 30):
        status, text = _sent(patient, head + length + b"\r\n\r\n")
        assert (status, json.loads(text)["error"]["message"]) == (413, "the body is larger than 1 MiB")
    status, text = _sent(patient, head + b"-1\r\n\r\n")
    assert (status, json.loads(text)["error"]["message"]) == (400, "Content-Length '-1' is not a number of bytes")
    assert patient.stop() == 0


def _head(size: int, first: bytes = b"GET /health HTTP/1.1\r\n") -> bytes:
    lines, rest = divmod(size - len(first) - 2, 1000)
    head = first + (b"a:" + b"b" * 996 + b"\r\n") * (lines - 1) + b"c:" + b"d" * (rest + 996) + b"\r\n\r\n"
    assert len(head) == size
    return head


def _sent_in_pieces(server: Server, pieces: list[bytes]) -> int:
    """Send bytes in pieces, and return the answer's status."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            with contextlib.suppress(OSError):  # the server may have refused what came before
                connection.sendall(piece)
            time.sleep(0.02)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status


def test_a_nul_in_a_header_is_refused(server: Server) -> None:
    status, text = _sent(server, b"GET /health HTTP/1.1\r\nContent-Length: 1\0\r\n\r\n")
    assert status == 400
    assert "is not a number of bytes" in text or "is not HTTP/1.1" in text  # httplib 0.11, and 0.18, which does not read it


@pytest.mark.parametrize(("size", "status"), [(65_536, 200), (65_537, 431), (65_600, 431), (81_920, 431)])
def test_the_longest_head_has_64_kib_however_it_arrives(server: Server, size: int, status: int) -> None:
    whole, body = _head(size), json.dumps(GOOD).encode()
    for cuts in ([], [100], [100, 16_484, 32_868, 49_252], [size - 1], [size - 2], [65_530]):
        ends = [0, *cuts, size]
        assert _sent_in_pieces(server, [whole[start:end] for start, end in itertools.pairwise(ends)]) == status
    post = _head(size, b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n" % len(body))
    assert _sent_in_pieces(server, [post + body]) == status
    assert _sent_in_pieces(server, [post, body]) == status


def test_a_head_has_100_headers_at_most(server: Server) -> None:
    for headers, status in ((100, 200), (101, 431), (200, 431)):
        assert _sent_in_pieces(server, [b"GET /health HTTP/1.1\r\n" + b"a:b\r\n" * headers + b"\r\n"]) == status


def test_a_long_head_takes_no_memory(server: Server) -> None:
    before = _resident_bytes(server.process.pid)
    for _ in range(4):
        status, text = _sent(server, b"GET /health HTTP/1.1\r\n" + b"a:b\r\n" * 1_000_000)
        says = "the request's head is longer than 64 KiB, or has more than 100 headers"
        assert (status, json.loads(text)["error"]["message"]) == (431, says)
    assert _resident_bytes(server.process.pid) - before < 16 << 20


def test_clients_of_http_1_0_get_no_chunks(server: Server) -> None:
    for stream in (False, True):
        body = json.dumps({**GOOD, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            head, _, rest = b"".join(iter(lambda: connection.recv(4096), b"")).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert rest.endswith(b"data: [DONE]\n\n") if stream else json.loads(rest)["object"] == "text_completion"


@contextlib.contextmanager
def _slow(server: Server, clients: int, head: bytes) -> Iterator[None]:
    """Run clients that send a byte every 0.2 s, as long as the server lets them."""
    gone = threading.Event()

    def send() -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection, contextlib.suppress(OSError):
            connection.sendall(head)
            started.release()
            while not gone.wait(0.2):
                connection.sendall(b" ")

    started = threading.Semaphore(0)
    with ThreadPoolExecutor(clients) as pool:
        for _ in range(clients):
            pool.submit(send)
        for _ in range(clients):
            started.acquire()
        try:
            yield
        finally:
            gone.set()


_SLOW = (b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 999\r\n\r\n{")


@pytest.mark.parametrize("head", _SLOW)
def test_a_request_that_does_not_arrive_in_time_frees_its_thread(bundle: Path, head: bytes) -> None:
    small = Server(bundle, "--connections", "2", "--arrival-s", "1")
    with _slow(small, clients=4, head=head):  # twice as many as there are threads
        assert json.loads(small.get("/health")) == {"status": "ok"}
    assert small.stop() == 0


def test_a_late_request_is_answered_with_408(bundle: Path) -> None:
    small = Server(bundle, "--arrival-s", "1")
    body, post = json.dumps(GOOD).encode(), b"POST /v1/completions HTTP/1.1\r\n"
    without_its_last_line = post + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(body), body)
    heads = [b"GET /health HTTP/1.1\r\nHost: a\r\n", post + b"Content-Length: 999\r\n\r\n{", without_its_last_line]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda head: _sent(small, head), heads))
    for status, text in answers:
        assert (status, json.loads(text)["error"]["message"]) == (408, "the request did not arrive within 1 s")
    assert small.stop() == 0


@pytest.mark.parametrize("head", _SLOW)
def test_shutdown_does_not_wait_for_requests_that_have_not_arrived(bundle: Path, head: bytes) -> None:
    ending = Server(bundle, "--arrival-s", "100")
    with _slow(ending, clients=1, head=head):
        assert json.loads(ending.get("/health")) == {"status": "ok"}  # connections are taken in their order
        assert ending.stop() == 0  # within 30 s


def test_a_request_on_its_way_at_shutdown_is_answered(bundle: Path) -> None:
    ending = Server(bundle)
    with socket.create_connection(("127.0.0.1", ending.port), timeout=30) as connection:
        connection.sendall(b"GET /hea")
        assert json.loads(ending.get("/health")) == {"status": "ok"}  # connections are taken in their order
        ending.ask_to_end()
        time.sleep(0.3)
        connection.sendall(b"lth HTTP/1.1\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, json.loads(answer.read())) == (503, {"status": "stopping"})
    assert ending.stop() == 0


def test_a_client_that_stops_sending_while_it_waits_is_refused_and_frees_its_place(bundle: Path) -> None:
    narrow = Server(bundle, "--rows", "1", "--queue", "65")
    asked = {"prompt": [PROMPT] * 64, "max_tokens": 128, "ignore_eos": True, "temperature": 0}
    body = json.dumps(GOOD).encode()
    with narrow.client.completions.create(model="model", stream=True, extra_body=asked, prompt=PROMPT) as stream:
        next(iter(stream))
        with socket.create_connection(("127.0.0.1", narrow.port), timeout=10) as waiting:
            waiting.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            narrow.until("rows_accepted_total", 65)
            waiting.shutdown(socket.SHUT_WR)
            assert b"".join(iter(lambda: waiting.recv(4096), b"")).startswith(b"HTTP/1.1 400 ")
        narrow.until("rows_cancelled_total", 1)
        assert narrow.metric("rows_completed_total") < 60
    assert narrow.stop() == 0


def test_bytes_that_are_not_http_harm_nobody(server: Server) -> None:
    for data in (
        b"\0" * 1000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999\r\n\r\n{",
        b"\r\n" * 100,
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(data)
    assert server.post(json.dumps(GOOD).encode())[0] == 200


def test_connections_under_the_thread_sanitizer(bundle: Path) -> None:
    """Answers, refusals, streams, clients that go away and shutdown, all at once."""
    program = BUILD / "thread" / "cpp_service" / "skd_service"
    sanitized = Server(bundle, "--connections", "6", "--rows", "2", "--queue", "40", program=program, **SANITIZERS)
    body = json.dumps({**GOOD, "stream": True}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nContent-Length: "
    sent = [
        b"GET /health HTTP/1.1\r\n\r\n", b"GET /metrics HTTP/1.1\r\n\r\n", b"GET /v1/models HTTP/1.1\r\n\r\n", b"\0\r\n\r\n",
        post + b"%d\r\n\r\n%s" % (len(body), body), post + b"-1\r\n\r\n", post + b"2\r\n\r\n{}",
        b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 20_000,
    ]  # fmt: skip

    def ask(turn: int) -> int:
        if turn % 10 < 8:
            return _sent(sanitized, sent[turn % 10])[0]
        with socket.create_connection(("127.0.0.1", sanitized.port), timeout=30) as client:  # gone before its answer is there
            client.sendall(sent[4])
        return 0

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(ask, range(60)))
    assert statuses[:10] == [200, 200, 200, 400, 200, 400, 400, 431, 0, 0]
    with ThreadPoolExecutor(2) as pool:
        long = {"prompt": [PROMPT] * 16, "max_tokens": 128, "ignore_eos": True, "stream": True}
        last = pool.submit(sanitized.post, json.dumps(long).encode())
        sanitized.until("rows_running", 2)
        sanitized.ask_to_end()
        assert last.result()[0] == 200
    assert sanitized.process.stderr is not None
    says = sanitized.process.stderr.read()
    assert (sanitized.stop(), says) == (0, "")
