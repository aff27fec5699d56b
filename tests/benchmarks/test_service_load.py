"""What the clients of service_load.py count."""

from __future__ import annotations

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
    for name in ("service_load", "machine"):
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
