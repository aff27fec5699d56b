"""The running C++ service, for the tests of its answers and of its connections."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule_builders import ScheduleRequest
from tests.once import made_once, shared_folder

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "cpp"
SERVICE = BUILD / "release" / "cpp_service" / "skd_service"
PROMPT = "name[The Mill], food[Italian], area[riverside] =>"
GOOD: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4}


class Server:
    """A running skd_service."""

    def __init__(self, bundle: Path, *options: str, program: Path = SERVICE, **environment: str) -> None:
        self.process = subprocess.Popen(
            [program, bundle, "--port", "0", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "LD_LIBRARY_PATH": str(BUILD / "deps" / "lib"), **environment},
        )  # fmt: skip
        self._asked = False
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on http://"), self.process.stderr.read()
        self.url = line.split()[-1]
        self.port = int(self.url.rsplit(":", 1)[1])
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def post(self, body: bytes, path: str = "/v1/completions") -> tuple[int, str]:
        request = urllib.request.Request(self.url + path, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def streamed(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        """The pieces of an answer, without the [DONE] that ends them."""
        _, text = self.post(json.dumps({**asked, "stream": True}).encode())
        return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]

    def metric(self, name: str) -> float:
        found = re.search(rf"^skipdecode_{name} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def until(self, name: str, value: float) -> None:
        """Wait until a metric has a value, ten seconds at most."""
        for _ in range(200):
            if self.metric(name) == value:
                return
            time.sleep(0.05)
        raise AssertionError(f"{name} is {self.metric(name)}, not {value}")

    def ask_to_end(self, by: signal.Signals = signal.SIGTERM) -> None:
        self._asked = True
        self.process.send_signal(by)

    def stop(self, by: signal.Signals = signal.SIGTERM) -> int:
        """End it and return its exit status. No second signal is sent, after which it would not wait for what runs."""
        if not self._asked:
            self.ask_to_end(by)
        code = self.process.wait(timeout=30)
        assert self.process.stdout is not None and self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()
        return code


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not SERVICE.exists():
        pytest.skip("the C++ service is not built: make cpp")

    def make(out: Path) -> None:
        schedule = ScheduleRequest(speedup=2, span=48, max_variants=4)
        export(ExportRequest(model=str(ROOT / "examples" / "e2e" / "model"), out=out, schedule=schedule, slim=True))

    return made_once(shared_folder(tmp_path_factory) / "service", make)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Server]:
    running = Server(bundle, "--rows", "4", "--queue", "16")
    yield running
    assert running.stop() == 0
