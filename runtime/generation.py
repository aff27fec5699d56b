"""What goes into a generation, and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Streamer(Protocol):
    """What transformers' streamers are: given tokens as they come."""

    def put(self, value: Any) -> None: ...

    def end(self) -> None: ...


@dataclass(slots=True)  # frozen, or a tuple with names, it takes 1.5x to 2x as long to make where caches are cold
class Step:
    """What one pass gave: the prefill's tokens first, then one step after another."""

    token_ids: tuple[int | None, ...]  # a row each; None for rows that have ended
    layers: int | None  # what this decode step computed (its deepest row); None for the prefill


@dataclass(slots=True)
class Row:
    """One row: its ids and its reason to stop."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None  # of token_ids; None where the bundle has no tokenizer
    finish_reason: str | None = None  # length, stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds, and generated tokens of all rows per second of prefill and decode."""

    load_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What `generate` gives."""

    sequences: tuple[Row, ...]
    layers: tuple[int, ...]  # layers[i]: what decode step i computed
    timings: Timings


Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
