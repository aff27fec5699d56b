"""Does the C++ service hold 200 streaming clients for a minute, with no error but the announced 429s and flat memory?

The clients are real (the openai package), and each asks again as soon as it is answered or refused. The shipped model runs at 2x,
with clients and server on the same machine, over loopback. If an answer ends after the minute, its status is counted, but only
those of its events that came in time. Exit status 1 if there was no 200, or anything other than 200 and 429, if memory grew by
over 5 %, or if the server was not healthy or did not stop cleanly at the end.

    make cpp && .venv/bin/python benchmarks/service_load.py [--clients 200] [--seconds 60]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import service
from machine import facts, write_results

from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule_builders import ScheduleRequest

ROOT = Path(__file__).parent.parent
ROWS, QUEUE = 16, 64


class Tally:
    """What the clients saw."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.first_token_s: list[float] = []
        self.tokens = 0  # events that came in time


async def client(api: openai.AsyncOpenAI, number: int, until: float, tally: Tally) -> None:
    """Ask, read the whole stream, ask again."""
    rng = random.Random(number)
    while time.monotonic() < until:
        began, answered = time.monotonic(), False
        try:
            stream = await api.completions.create(
                model="model", prompt=f"name[The Mill {rng.randrange(100)}], food[Italian] =>",
                max_tokens=rng.randrange(10, 60), temperature=0.7, stream=True,
            )  # fmt: skip
            async for _ in stream:
                if not answered:
                    tally.first_token_s.append(time.monotonic() - began)
                    answered = True
                tally.tokens += time.monotonic() < until
            tally.statuses["200"] += 1
        except openai.RateLimitError:
            tally.statuses["429"] += 1
            await asyncio.sleep(rng.uniform(0.1, 0.5))
        except Exception as error:
            tally.statuses[type(error).__name__] += 1


async def load(url: str, clients: int, seconds: float, process: psutil.Process) -> tuple[Tally, list[float]]:
    """Run all clients; returns what they saw, and the server's resident MiB every two seconds."""
    tally, memory, until = Tally(), [], time.monotonic() + seconds
    api = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    running = [asyncio.create_task(client(api, number, until, tally)) for number in range(clients)]
    while time.monotonic() < until:
        await asyncio.sleep(2)
        memory.append(process.memory_info().rss / 2**20)
    await asyncio.gather(*running)
    return tally, memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "engines"
        export(ExportRequest(model=str(ROOT / "examples" / "e2e" / "model"), out=bundle, schedule=ScheduleRequest(span=48)))
        arguments = ("--rows", str(ROWS), "--queue", str(QUEUE), "--connections", "256")
        with service.serving(bundle, *arguments) as (server, url):
            tally, memory = asyncio.run(load(url, options.clients, options.seconds, psutil.Process(server.pid)))
            with urllib.request.urlopen(f"{url}/health", timeout=10) as health:
                healthy = health.status == 200
    result = _result(options, tally, memory, healthy, server.returncode)
    print(json.dumps(result, indent=2))
    if result["holds"] and options.seconds >= 60:
        write_results("service-load", result)
    return 0 if result["holds"] else 1


def _result(options: argparse.Namespace, tally: Tally, memory: list[float], healthy: bool, exit_status: int) -> dict[str, Any]:
    settled = memory[len(memory) // 4 :]  # after the first quarter every row has been bound once
    growth = settled[-1] / settled[0] - 1
    waits = tally.first_token_s
    percentiles = np.percentile(waits, [50, 90, 99]).tolist() if waits else [None] * 3
    return {
        "machine": facts(), "clients": options.clients, "seconds": options.seconds, "rows": ROWS, "queue": QUEUE,
        "answers": dict(tally.statuses), "events_per_s": tally.tokens / options.seconds,
        "first_token_s": dict(zip(("p50", "p90", "p99"), percentiles, strict=True)),
        "resident_mib": {"after_a_quarter": settled[0], "end": settled[-1], "growth": growth},
        "holds": {"200"} <= set(tally.statuses) <= {"200", "429"} and growth <= 0.05 and healthy and exit_status == 0,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
