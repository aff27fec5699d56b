"""Whole runs as a service sees them: time to first token and of every token, tokens per second; against full depth."""

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
    """One prompt's length and how many tokens it wants."""

    prompt_tokens: int
    new_tokens: int


def read_requests(path: Path) -> list[Request]:
    """A JSONL file of real lengths: `{"prompt_tokens": 37, "new_tokens": 64}` a line.

    Raises:
        CapacityError: unreadable, empty, or a malformed line (which one).
    """
    requests = []
    for where, data in read_jsonl(path):
        prompt, new = (data.get("prompt_tokens"), data.get("new_tokens")) if isinstance(data, dict) else (None, None)
        if type(prompt) is not int or type(new) is not int or min(prompt, new) < 1:
            raise CapacityError("is no request", 'write {"prompt_tokens": 37, "new_tokens": 64}', where=where)
        requests.append(Request(prompt_tokens=prompt, new_tokens=new))
    return requests


def read_jsonl(path: Path) -> list[tuple[str, Any]]:
    """(file and line, value) of each line that is not blank.

    Raises:
        CapacityError: unreadable, not JSON (which line), or no line at all.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")  # of what else ends lines JSON's strings may have some
    except (OSError, UnicodeDecodeError) as error:
        raise CapacityError(f"cannot be read ({error})", "name a UTF-8 file, an object a line", where=str(path)) from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append((f"{path}, line {number}", json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise CapacityError(f"is not JSON ({error})", "write an object a line", where=f"{path}, line {number}") from error
    if not rows:
        raise CapacityError("is empty", "write an object a line", where=str(path))
    return rows


def check_fits(requests: Sequence[Request], batch: int, generator: Generator, where: str) -> None:
    """Raises CapacityError where there are fewer requests than `batch`, only requests that do not run have decode steps, or
    requests that run together exceed the bundle's length: the last one ends them all.
    """
    if batch > len(requests):
        raise CapacityError(
            f"a batch of {batch} needs as many requests, the file has {len(requests)}",
            f"choose --batch {len(requests)} or less, or add requests",
            where=where,
        )
    groups = list(_groups(requests, batch))
    if max(request.new_tokens for group in groups for request in group) == 1 < max(request.new_tokens for request in requests):
        raise CapacityError(
            f"only the last requests, which fill no batch of {batch} and do not run, have 2 new_tokens",
            "write them first, or choose another --batch",
            where=where,
        )
    limit = generator.manifest.limits.max_length
    for group in groups:
        prompt, new = max(request.prompt_tokens for request in group), max(request.new_tokens for request in group)
        if prompt + new > limit:
            together = f", of {len(group)} requests that run together," if len(group) > 1 else ""
            raise CapacityError(
                f"{prompt} prompt tokens and {new} new ones{together} exceed the bundle's {limit}",
                "ask for fewer, or export with a larger --max-length",
                where=where,
            )


def _groups(requests: Sequence[Request], batch: int) -> Iterator[Sequence[Request]]:
    """`batch` at a time, in their order; without those that are left over, because fewer rows have another time a token."""
    return (requests[start : start + batch] for start in range(0, len(requests) - batch + 1, batch))


@dataclass(slots=True)
class _Pass:
    """When the tokens of one pass over the workload came: seconds, a list a batch of requests."""

    first: list[float]
    gaps: list[list[float]]  # of each decode step
    tokens: int = 0
    total: float = 0.0

    @property
    def decode(self) -> float:
        return sum(map(sum, self.gaps))


def measure_workload(generator: Generator, step_bytes: StepBytes, requests: Sequence[Request], batch: int) -> dict[str, Any]:
    """Run the requests `batch` at a time, in their order; the schedule and full depth take turns.

    The last ones do not run where they are fewer than `batch`: their steps would be counted among those of more rows.

    Returns:
        How many requests ran. For the schedule ("own") and full depth ("full"): ms to the first token (prefill and sampling), ms
        a token, tokens per second end to end; the gains, as medians of the rounds' ratios; and for each position of the first
        batch the median time and what the bytes that it reads promise.
    """
    own = generator.manifest.schedule
    schedules = {"own": own, "full": full_depth(own.num_layers)}
    traces: dict[str, list[_Pass]] = {name: [] for name in schedules}

    # on a device the other schedule took the loop: its buffers are made anew, and a step's second time pays for the capture
    warm_ups = 0 if generator.engines.turn_around is None else 2

    def run(name: str) -> float:
        for _ in range(warm_ups):
            _run(generator, requests, batch, schedules[name])
        traces[name].append(_run(generator, requests, batch, schedules[name]))
        return traces[name][-1].decode

    interleave({name: lambda name=name: run(name) for name in schedules}, EFFORT)  # type: ignore[misc]
    kept = {name: found[1:] for name, found in traces.items()}  # the first was the warm-up
    pairs = list(zip(kept["full"], kept["own"], strict=True))
    return {
        "batch": batch,
        "requests": len(requests) // batch * batch,
        **{name: _figures(found) for name, found in kept.items()},
        "decode_gain": asdict(Summary.of([full.decode / own.decode for full, own in pairs])) if kept["own"][0].decode else None,
        "end_to_end_gain": asdict(Summary.of([full.total / own.total for full, own in pairs])),
        "positions": _positions(kept, own, step_bytes, [request.prompt_tokens for request in requests[:batch]]),
    }


def _run(generator: Generator, requests: Sequence[Request], batch: int, schedule: Schedule) -> _Pass:
    trace, rng = _Pass(first=[], gaps=[]), np.random.default_rng(0)
    for group in _groups(requests, batch):
        ids = [rng.integers(0, generator.manifest.model.vocab_size, request.prompt_tokens).tolist() for request in group]
        steps = generator.stream(
            [Row(prompt_ids=row) for row in ids], max_new_tokens=max(request.new_tokens for request in group),
            sampling=Sampling(), schedule=schedule, ignore_eos=True,
        )  # fmt: skip
        times = [time.perf_counter(), *(time.perf_counter() for _ in steps)]
        trace.first.append(times[1] - times[0])
        trace.gaps.append(np.diff(times[1:]).tolist())
        trace.tokens += sum(request.new_tokens for request in group)
        trace.total += times[-1] - times[0]
    return trace


def _figures(traces: list[_Pass]) -> dict[str, Any]:
    gaps = [1e3 * gap for trace in traces for batch in trace.gaps for gap in batch]
    return {
        "ttft_ms": asdict(Summary.of([1e3 * first for trace in traces for first in trace.first])),
        "token_ms": asdict(Summary.of(gaps)) if gaps else None,
        "tokens_per_s": asdict(Summary.of([trace.tokens / trace.total for trace in traces])),
    }


def _positions(
    traces: dict[str, list[_Pass]], own: Schedule, step_bytes: StepBytes, prompts: Sequence[int]
) -> list[dict[str, Any]]:
    """Of the first batch, whose prompts have these lengths: position, layers of the deepest row, median ms of both, and full
    depth's ms scaled by the bytes that are read.
    """
    medians = {name: 1e3 * np.median([trace.gaps[0] for trace in found], axis=0) for name, found in traces.items()}
    rows = []
    for t, (taken, full) in enumerate(zip(medians["own"].tolist(), medians["full"].tolist(), strict=True)):
        counts = [own.layers_at(t if own.anchor is Anchor.GENERATED else prompt + t) for prompt in prompts]
        contexts = [prompt + t + 1 for prompt in prompts]
        share = _read(step_bytes, counts, contexts) / _read(step_bytes, [own.num_layers] * len(prompts), contexts)
        rows.append({"position": t, "layers": max(counts), "ms": taken, "full_ms": full, "promised_ms": full * share})
    return rows


def _read(step_bytes: StepBytes, counts: Sequence[int], contexts: Sequence[int]) -> int:
    """Bytes of a step, each row with its layer count and its valid positions; the deepest row's weights serve all."""
    rows = zip(counts, contexts, strict=True)
    kept = sum(step_bytes.of(count, 1, context) - step_bytes.of(count, 0, context) for count, context in rows)
    return step_bytes.of(max(counts), 0, 0) + kept
