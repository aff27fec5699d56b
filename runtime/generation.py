"""The inputs and outputs of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol

from skipdecode.errors import CapacityError
from skipdecode.manifest import Manifest


class Streamer(Protocol):
    """Receives tokens as they are generated, like transformers' streamers.

    It never gets the prompt, so create transformers' streamers without `skip_prompt`.
    """

    def put(self, value: Any) -> None: ...

    def end(self) -> None: ...


@dataclass(slots=True)  # frozen, or as a named tuple, it takes 1.5x to 2x as long to create with cold caches
class Step:
    """The result of one pass: first that of the prefill, then of one decode step after another."""

    token_ids: tuple[int | None, ...]  # one per row; None for rows that have ended
    layers: int | None  # how many this decode step computed (its deepest row); None for the prefill


@dataclass(slots=True)
class Row:
    """One row of a batch: its prompt, its generated tokens, and why it ended."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None  # of token_ids, set by `generate`; None where the bundle has no tokenizer
    finish_reason: str | None = None  # length or stop; with `stream` also what the caller sets to end the row; None: it goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Times in seconds, and the generated tokens of all rows per second of prefill and decode together."""

    load_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The result of `Generator.generate`."""

    sequences: tuple[Row, ...]  # in the order of the prompts
    layers: tuple[int, ...]  # layers[i]: how many layers decode step i computed (its deepest row)
    timings: Timings


def check_rows(rows: Sequence[Row], max_new_tokens: int, manifest: Manifest) -> int:
    """Refuse rows that the bundle cannot run: too many, too long, empty, an unknown id, or used before or twice.

    Returns:
        `max_new_tokens` as a Python int: numpy's narrow integers would wrap in sums.

    Raises:
        CapacityError: such rows, or `max_new_tokens` is not a positive integer.
    """
    limits, vocabulary = manifest.limits, manifest.model.vocab_size
    if not rows:
        raise CapacityError("there is no prompt", "give at least one")
    if len(rows) > limits.max_batch:
        raise CapacityError(
            f"{len(rows)} prompts: the bundle takes {limits.max_batch}", "send fewer, or export with a larger --max-batch"
        )
    if len(set(map(id, rows))) < len(rows):
        raise CapacityError("the same Row is given twice", "create one per prompt", where="rows")
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
        raise CapacityError(f"{max_new_tokens} is not a positive count", "choose 1 or more", where="--max-new-tokens")
    new = int(max_new_tokens)
    for index, row in enumerate(rows):
        where, length = f"prompt {index}", len(row.prompt_ids)
        if not length:
            raise CapacityError("is empty", "give at least one token", where=where)
        if row.token_ids or row.finish_reason is not None:
            raise CapacityError("has tokens from an earlier run", "create a new Row with them in its prompt", where=where)
        if length + new > limits.max_length:
            raise CapacityError(
                f"{length} tokens and {new} new ones exceed the bundle's {limits.max_length}",
                "shorten the prompt, ask for fewer, or export with a larger --max-length",
                where=where,
            )
        outside = [token for token in row.prompt_ids if not isinstance(token, Integral) or not 0 <= token < vocabulary]
        if outside:
            raise CapacityError(
                f"token id {outside[0]} is outside the vocabulary", f"give ids from 0 to {vocabulary - 1}", where=where
            )
    return new
