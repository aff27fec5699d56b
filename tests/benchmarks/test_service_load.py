"""What the clients of service_load.py count, and when its result holds."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def service_load(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("openai")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    yield importlib.import_module("service_load")
    for name in ("service_load", "service", "machine"):
        sys.modules.pop(name, None)


def test_pieces_after_the_minute_are_not_counted_but_their_answer_is(service_load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(service_load, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def pieces() -> AsyncIterator[None]:
        for _ in range(5):
            clock.now += 20
            yield

    async def create(**_: Any) -> AsyncIterator[None]:
        return pieces()

    api = SimpleNamespace(completions=SimpleNamespace(create=create))
    tally = service_load.Tally()
    asyncio.run(service_load.client(api, 0, 60.0, tally))
    assert tally.tokens == 2
    assert tally.statuses == {"200": 1}
    assert tally.first_token_s == [20]


@pytest.mark.parametrize(
    ("statuses", "waits", "holds"),
    [
        ({"200": 2, "429": 1}, [1.0, 3.0], True),
        ({"429": 3}, [], False),
        ({}, [], False),
        ({"200": 1, "APIError": 1}, [1.0], False),
    ],
)
def test_a_result_holds_only_with_an_answer_and_no_error(
    service_load: Any, statuses: dict[str, int], waits: list[float], holds: bool
) -> None:
    tally = service_load.Tally()
    tally.statuses.update(statuses)
    tally.first_token_s += waits
    result = service_load._result(argparse.Namespace(clients=1, seconds=60.0), tally, [10.0, 10.0], True, 0)
    assert result["holds"] is holds
    assert result["first_token_s"]["p50"] == (sum(waits) / len(waits) if waits else None)
    assert result["answers"] == statuses
