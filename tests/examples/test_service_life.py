"""The C++ service from its start to its end: what the system refuses it, who is let in, and what shutdown waits for."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.examples.conftest import BUILD, GOOD, PROMPT, ROOT, SERVICE, Server

LONG = {"prompt": PROMPT, "max_tokens": 128, "ignore_eos": True, "temperature": 0, "stream": True}


def _started(bundle: Path, *options: str, address_space: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a service that ends by itself, with at most `address_space` bytes of it."""

    def limit() -> None:
        if address_space is not None:
            resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))

    return subprocess.run(
        [SERVICE, bundle, *options], capture_output=True, text=True, timeout=60, check=False, preexec_fn=limit,
        env={**os.environ, "LD_LIBRARY_PATH": str(BUILD / "deps" / "lib")},
    )  # fmt: skip


def _refused(bundle: Path, *options: str, address_space: int | None = None) -> str:
    """The one line that a service prints if it cannot start."""
    done = _started(bundle, *options, address_space=address_space)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


def test_a_port_that_another_service_listens_on_is_not_shared(server: Server, bundle: Path) -> None:
    says = f"127.0.0.1:{server.port}: cannot listen (Address already in use); choose another --port\n"
    assert _refused(bundle, "--port", str(server.port)) == says


def test_a_host_that_is_not_this_machines_gives_one_line(bundle: Path) -> None:
    assert "name an address of this machine with --host" in _refused(bundle, "--host", "192.0.2.1", "--port", "0")
    assert _refused(bundle, "--host", "no..host").startswith("--host: 'no..host' is not an address (")


def test_connections_that_the_system_has_no_threads_for_give_one_line(bundle: Path) -> None:
    """4096 stacks of 8 MiB are more than the address space that it gets."""
    says = _refused(bundle, "--port", "0", "--connections", "4096", address_space=4 << 30)
    assert says.startswith("the system cannot start more threads (") and "choose fewer --connections" in says


def test_running_out_of_memory_is_not_reported_as_a_damaged_bundle(bundle: Path) -> None:
    for mebibytes in range(100, 200, 20):  # where memory runs out differs from start to start; some failed allocations kill it
        done = _started(bundle, "--port", "0", address_space=mebibytes << 20)
        assert done.returncode != 0 and "export the model again" not in done.stderr, done.stderr


@pytest.fixture(scope="module")
def failing_accept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("standin") / "libaccept.so"
    source = ROOT / "tests" / "standin" / "libaccept.cc"
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror", source, "-o", library, "-ldl"], check=True)
    return library


@contextlib.contextmanager
def _failing(library: Path, errors: list[int], bundle: Path, *options: str) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("ACCEPT_ERRORS", ",".join(map(str, errors)))
        started = Server(bundle, *options)
    try:
        yield started
    finally:
        started.process.kill()


def test_connections_that_cannot_be_accepted_do_not_end_the_service(failing_accept: Path, bundle: Path) -> None:
    lost = [errno.ECONNABORTED, errno.EINTR, errno.EPROTO, errno.EPERM, errno.ENETDOWN]
    scarce = [errno.ENFILE, errno.EMFILE, errno.ENOBUFS, errno.ENOMEM]
    with _failing(failing_accept, lost + scarce, bundle) as server:
        assert json.loads(server.get("/health")) == {"status": "ok"}
        server.ask_to_end()
        assert server.process.stderr is not None
        says = server.process.stderr.read()
        assert (server.stop(), says.count("\n")) == (0, 1)
        assert says.startswith("no room for another connection (Too many open files in system), new ones wait")


def test_a_service_that_cannot_accept_any_more_finishes_what_runs_and_says_so(failing_accept: Path, bundle: Path) -> None:
    with _failing(failing_accept, [0, errno.EBADF], bundle) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("POST", "/v1/completions", json.dumps(LONG))
        answer = connection.getresponse()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=30):
            pass
        assert answer.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        assert server.process.stderr is not None
        says = server.process.stderr.read()
        assert server.stop() == 1
        assert says == "no more connections can be accepted (Bad file descriptor); restart the service\n"


def test_the_first_signal_once_accepting_has_failed_does_not_end_what_runs(failing_accept: Path, bundle: Path) -> None:
    with _failing(failing_accept, [0, errno.EBADF], bundle, "--rows", "1") as server, _streaming(server) as answer:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=30):
            pass
        assert server.process.stderr is not None
        assert server.process.stderr.readline().startswith("no more connections can be accepted")
        server.ask_to_end()
        assert answer.read().endswith(b"data: [DONE]\n\n")
        assert server.stop() == 1


def test_a_service_out_of_descriptors_lets_clients_wait(bundle: Path) -> None:
    small = Server(bundle, "--arrival-s", "2")
    used = len(os.listdir(f"/proc/{small.process.pid}/fd"))
    resource.prlimit(small.process.pid, resource.RLIMIT_NOFILE, (used + 4, used + 4))
    with contextlib.ExitStack() as clients:
        for _ in range(8):
            clients.enter_context(socket.create_connection(("127.0.0.1", small.port), timeout=30))
        assert json.loads(small.get("/health")) == {"status": "ok"}  # when the first four have had their two seconds
    assert small.stop() == 0


def test_a_service_without_standard_streams_gives_their_numbers_to_no_client(bundle: Path) -> None:
    none = subprocess.DEVNULL  # until the shell has closed them
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", SERVICE, bundle, "--port", "0"]
    running = subprocess.Popen(command, stdin=none, stdout=none, stderr=none)
    folder, links = Path(f"/proc/{running.pid}/fd"), dict[str, str]()
    deadline = time.monotonic() + 60
    while running.poll() is None and not any(link.startswith("socket:") for link in links.values()):
        assert time.monotonic() < deadline, "it does not serve"
        time.sleep(0.05)
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links = {each.name: os.readlink(each) for each in folder.iterdir()}
    running.terminate()
    assert running.wait(timeout=30) in (0, -signal.SIGTERM)  # the signal may come before it serves
    assert [links[name] for name in "012"] == ["/dev/null"] * 3


def test_more_clients_than_connections_are_all_served(bundle: Path) -> None:
    narrow = Server(bundle, "--connections", "2", "--queue", "64")
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(narrow.post, [json.dumps(GOOD).encode()] * 40))
    assert {status for status, _ in answers} == {200}
    assert narrow.stop() == 0


def test_a_signal_before_a_service_listens_ends_it_at_once(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.c").write_text(
        '#include <unistd.h>\n__attribute__((constructor)) static void Load(void) { write(1, "loads\\n", 6); sleep(30); }\n'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", tmp_path / "slow.c", "-o", tmp_path / "slow.so"], check=True)
    for by in (signal.SIGTERM, signal.SIGINT):
        command = [SERVICE, bundle, "--onnxruntime-library", tmp_path / "slow.so"]
        loading = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert loading.stdout is not None and loading.stdout.readline() == b"loads\n"
        loading.send_signal(by)
        assert loading.communicate(timeout=10) == (b"", b"")
        assert loading.returncode == -by


def _until_stopping(server: Server) -> None:
    """Wait until a service reports that it is stopping, ten seconds at most."""
    for _ in range(200):
        try:
            server.get("/health")
        except urllib.error.HTTPError as error:
            assert json.loads(error.read()) == {"status": "stopping"}
            return
        time.sleep(0.05)
    raise AssertionError("it does not stop")


@contextlib.contextmanager
def _streaming(server: Server) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps({**LONG, "prompt": [PROMPT] * 16}))
    with contextlib.closing(connection):
        yield connection.getresponse()


def test_signals_in_quick_succession_count_as_one_and_what_runs_is_finished(bundle: Path) -> None:
    """As from timeout(1), which signals its child and then the process group that the child is in."""
    for pause_s in (0, 0.001, 0.1):
        ending = Server(bundle, "--rows", "1")
        with _streaming(ending) as answer:
            for by in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                ending.ask_to_end(by)
                time.sleep(pause_s)
            assert answer.read().endswith(b"data: [DONE]\n\n")
        assert ending.stop() == 0


def test_an_interrupt_that_was_ignored_when_it_started_stays_ignored(bundle: Path) -> None:
    """As a shell ignores it for what a script starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        background = Server(bundle)
    finally:
        signal.signal(signal.SIGINT, before)
    background.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert json.loads(background.get("/health")) == {"status": "ok"}
    assert background.stop() == 0


def test_a_second_signal_does_not_wait_for_what_runs(bundle: Path) -> None:
    ending = Server(bundle, "--rows", "1", "--queue", "20000")
    body = json.dumps({"prompt": [[5]] * 20_000, "max_tokens": 128, "ignore_eos": True}).encode()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ending.post, body)
        ending.until("rows_running", 1)
        ending.ask_to_end()
        _until_stopping(ending)
        time.sleep(1.1)  # one that comes sooner counts as the first
        ending.ask_to_end(signal.SIGINT)
        assert ending.stop() == -signal.SIGINT
        assert asked.exception() is not None


def test_clients_that_wait_for_a_connection_at_shutdown_are_answered(bundle: Path) -> None:
    narrow = Server(bundle, "--connections", "1")
    running = http.client.HTTPConnection("127.0.0.1", narrow.port, timeout=30)
    running.request("POST", "/v1/completions", json.dumps(LONG))
    answer = running.getresponse()
    with socket.create_connection(("127.0.0.1", narrow.port), timeout=30) as waiting:
        waiting.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        narrow.ask_to_end()
        assert answer.read().endswith(b"data: [DONE]\n\n")
        running.close()
        late = http.client.HTTPResponse(waiting)
        late.begin()
        assert (late.status, json.loads(late.read())) == (503, {"status": "stopping"})
    assert narrow.stop() == 0


@pytest.mark.parametrize("bytes_a_look", [0, 30_000])
def test_shutdown_does_not_wait_for_clients_that_read_nothing_or_read_slowly(bundle: Path, bytes_a_look: int) -> None:
    """An answer of 10 MB, far more than sockets hold: most of its many prompts have no time to run."""
    ending = Server(bundle, "--timeout-s", "2", "--queue", "150000")
    body = json.dumps({"prompt": [[5]] * 150_000}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
        client.settimeout(30)
        client.connect(("127.0.0.1", ending.port))
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
        asked = time.monotonic()
        ending.ask_to_end()
        while ending.process.poll() is None and time.monotonic() - asked < 25:
            if bytes_a_look:
                client.recv(bytes_a_look)
            time.sleep(0.1)  # reading all of it would take half a minute
        assert time.monotonic() - asked < 15  # --timeout-s, 5 s to read what is there, and the time to end
    assert ending.stop() == 0


def test_clients_that_go_away_leave_no_descriptors_threads_or_rows(bundle: Path) -> None:
    running = Server(bundle, "--connections", "8")
    process = Path("/proc") / str(running.process.pid)

    def held() -> tuple[int, int]:
        return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))

    before = held()
    body = json.dumps(LONG).encode()
    for taken in range(40):  # they leave before, during and after the answer's head
        with socket.create_connection(("127.0.0.1", running.port), timeout=30) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            if taken % 3:
                client.recv(taken % 3 * 200)
    running.until("rows_running", 0)
    running.until("rows_queued", 0)
    for _ in range(100):
        if held() == before:
            break
        time.sleep(0.05)
    assert held() == before
    assert running.stop() == 0


def test_a_range_header_changes_no_answer(server: Server) -> None:
    """httplib would answer 206, in as many parts as the header has."""
    for method, path, body in (("POST", "/v1/completions", json.dumps(GOOD)), ("GET", "/metrics", None)):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request(method, path, body, {"Range": "bytes=" + ",".join(["1-1"] * 1000)})
        answer = connection.getresponse()
        assert (answer.status, b"multipart" in answer.read()) == (200, False)
        connection.close()
