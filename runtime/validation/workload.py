"""Whole runs as a service sees them, against full depth: time to first token, time per token, tokens per second."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from skipdecode.errors import CapacityError
from skipdecode.generate import Generator
from skipdecode.generation import Row
from skipdecode.sampling import Sampling
from skipdecode.schedule import Anchor, Schedule, full_depth
from skipdecode.validation.samples import Effort, Summary, interleave
from skipdecode.validation.step_bytes import StepBytes

EFFORT = Effort(rounds=3, spread=0.02, seconds=12.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt's length and how many tokens to generate."""

    prompt_tokens: int
    new_tokens: int


def read_requests(path: Path) -> list[Request]:
    """Read a JSONL file of real lengths, with `{"prompt_tokens": 37, "new_tokens": 64}` on each line.

    Raises:
        CapacityError: unreadable, empty, or a malformed line, which is named.
    """
    requests = []
    for where, data in read_jsonl(path):
        prompt, new = (data.get("prompt_tokens"), data.get("new_tokens")) if isinstance(data, dict) else (None, None)
        if type(prompt) is not int or type(new) is not int or min(prompt, new) < 1:
            raise CapacityError("is not a request", 'write {"prompt_tokens": 37, "new_tokens": 64}', where=where)
        requests.append(Request(prompt_tokens=prompt, new_tokens=new))
    return requests


def read_jsonl(path: Path) -> list[tuple[str, Any]]:
    """Read a JSONL file: ("FILE, line N", value) of each line that is not blank.

    Raises:
        CapacityError: unreadable, a line that is not JSON, which is named, or no line at all.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")  # JSON strings may hold other characters that end lines
    except (OSError, UnicodeDecodeError) as error:
        raise CapacityError(f"cannot be read ({error})", "name a UTF-8 file with one object per line", where=str(path)) from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append((f"{path}, line {number}", json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise CapacityError(
                    f"is not JSON ({error})", "write one object per line", where=f"{path}, line {number}"
                ) from error
    if not rows:
        raise CapacityError("is empty", "write one object per line", where=str(path))
    return rows


def check_fits(requests: Sequence[Request], batch: int, generator: Generator, where: str) -> None:
    """Check that the requests can run `batch` at a time.

    Raises:
        CapacityError: there are fewer requests than `batch`; only left-over requests, which do not run, have decode steps; or
            requests that run together, all until the longest one ends, exceed the bundle's length.
    """
    if batch > len(requests):
        raise CapacityError(
            f"a batch of {batch} needs as many requests, but the file has {len(requests)}",
            f"choose --batch {len(requests)} or less, or add requests",
            where=where,
        )
    groups = list(_groups(requests, batch))
    if max(request.new_tokens for group in groups for request in group) == 1 < max(request.new_tokens for request in requests):
        raise CapacityError(
            f"only the last requests have 2 new_tokens, and they do not run because they do not fill a batch of {batch}",
            "put them first, or choose another --batch",
            where=where,
        )
    limit = generator.manifest.limits.max_length
    for group in groups:
        prompt, new = max(request.prompt_tokens for request in group), max(request.new_tokens for request in group)
        if prompt + new > limit:
            together = f", of {len(group)} requests that run together," if len(group) > 1 else ""
            smaller = ", choose a smaller --batch" if len(group) > 1 else ""
            raise CapacityError(
                f"{prompt} prompt tokens and {new} new ones{together} exceed the bundle's {limit}",
                f"ask for fewer{smaller}, or export with a larger --max-length",
                where=where,
            )


def _groups(requests: Sequence[Request], batch: int) -> Iterator[Sequence[Request]]:
    """The requests in order, `batch` at a time. Left-over ones are dropped: with fewer rows a token takes another time."""
    return (requests[start : start + batch] for start in range(0, len(requests) - batch + 1, batch))


@dataclass(slots=True)
class _Pass:
    """When the tokens of one pass over the workload came, in seconds, with one entry per batch of requests."""

    first: list[float]
    gaps: list[list[float]]  # of each decode step
    tokens: int = 0
    total: float = 0.0

    @property
    def decode(self) -> float:
        return sum(map(sum, self.gaps))


def measure_workload(generator: Generator, step_bytes: StepBytes, requests: Sequence[Request], batch: int) -> dict[str, Any]:
    """Run the requests in order, `batch` at a time; the schedule and full depth take turns.

    Left-over requests, fewer than `batch`, do not run: their steps would be counted among those of more rows.

    Returns:
        How many requests ran. For the schedule ("own") and full depth ("full"): ms to the first token (prefill and sampling), ms
        a token, tokens per second end to end. The gains, as medians of the rounds' ratios. For each position of the first batch:
        the median time, and the time that the bytes it reads promise.
    """
    own = generator.manifest.schedule
    schedules = {"own": own, "full": full_depth(own.num_layers)}
    passes: dict[str, list[_Pass]] = {name: [] for name in schedules}

    # on a device the other schedule has replaced the loop: the first run rebuilds its buffers, the second captures its steps
    warm_ups = 0 if generator.engines.turn_around is None else 2

    def run(name: str) -> float:
        for _ in range(warm_ups):
            _run(generator, requests, batch, schedules[name])
        passes[name].append(_run(generator, requests, batch, schedules[name]))
        return passes[name][-1].decode

    interleave({name: lambda name=name: run(name) for name in schedules}, EFFORT)  # type: ignore[misc]
    counted = {name: measured[1:] for name, measured in passes.items()}  # the first was the warm-up
    pairs = list(zip(counted["full"], counted["own"], strict=True))
    return {
        "batch": batch,
        "requests": len(requests) // batch * batch,
        **{name: _figures(measured) for name, measured in counted.items()},
        "decode_gain": asdict(Summary.of([full.decode / own.decode for full, own in pairs])) if pairs[0][1].decode else None,
        "end_to_end_gain": asdict(Summary.of([full.total / own.total for full, own in pairs])),
        "positions": _positions(counted, own, step_bytes, [request.prompt_tokens for request in requests[:batch]]),
    }


def _run(generator: Generator, requests: Sequence[Request], batch: int, schedule: Schedule) -> _Pass:
    measured, rng = _Pass(first=[], gaps=[]), np.random.default_rng(0)
    for group in _groups(requests, batch):
        ids = [rng.integers(0, generator.manifest.model.vocab_size, request.prompt_tokens).tolist() for request in group]
        steps = generator.stream(
            [Row(prompt_ids=row) for row in ids], max_new_tokens=max(request.new_tokens for request in group),
            sampling=Sampling(), schedule=schedule, ignore_eos=True,
        )  # fmt: skip
        times = [time.perf_counter(), *(time.perf_counter() for _ in steps)]
        measured.first.append(times[1] - times[0])
        measured.gaps.append(np.diff(times[1:]).tolist())
        measured.tokens += sum(request.new_tokens for request in group)
        measured.total += times[-1] - times[0]
    return measured


def _figures(passes: list[_Pass]) -> dict[str, Any]:
    gaps = [1e3 * gap for each in passes for batch in each.gaps for gap in batch]
    return {
        "ttft_ms": asdict(Summary.of([1e3 * first for each in passes for first in each.first])),
        "token_ms": asdict(Summary.of(gaps)) if gaps else None,
        "tokens_per_s": asdict(Summary.of([each.tokens / each.total for each in passes])),
    }


def _positions(
    passes: dict[str, list[_Pass]], own: Schedule, step_bytes: StepBytes, prompts: Sequence[int]
) -> list[dict[str, Any]]:
    """For each position of the first batch: layers of the deepest row, median ms with the schedule and at full depth, and the
    latter scaled by the bytes read. `prompts`: the lengths of the batch's prompts.
    """
    medians = {name: 1e3 * np.median([each.gaps[0] for each in measured], axis=0) for name, measured in passes.items()}
    rows = []
    for t, (own_ms, full_ms) in enumerate(zip(medians["own"].tolist(), medians["full"].tolist(), strict=True)):
        counts = [own.layers_at(t if own.anchor is Anchor.GENERATED else prompt + t) for prompt in prompts]
        contexts = [prompt + t + 1 for prompt in prompts]
        share = _bytes_read(step_bytes, counts, contexts) / _bytes_read(step_bytes, [own.num_layers] * len(prompts), contexts)
        rows.append({"position": t, "layers": max(counts), "ms": own_ms, "full_ms": full_ms, "promised_ms": full_ms * share})
    return rows


def _bytes_read(step_bytes: StepBytes, counts: Sequence[int], contexts: Sequence[int]) -> int:
    """Bytes that a step reads, given each row's layer count and valid positions; the deepest row's weights serve all rows."""
    rows = zip(counts, contexts, strict=True)
    row_bytes = sum(step_bytes.of(count, 1, context) - step_bytes.of(count, 0, context) for count, context in rows)
    return step_bytes.of(max(counts), 0, 0) + row_bytes
