"""Prefill and every variant's decode step, over batch and context.

A step is what a run makes of it: on the CPU a call that is waited for; on a device with a turn-around one of a block of steps
that the host asks for one after another, each a captured graph, and waits for the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from skipdecode.decoder import Decoder
from skipdecode.device_loop import DeviceLoop
from skipdecode.generate import Generator
from skipdecode.schedule import Schedule
from skipdecode.validation.samples import Effort, Summary, interleave
from skipdecode.validation.step_bytes import StepBytes

DECODE = Effort(rounds=10)
PREFILL = Effort(rounds=3, spread=0.05, seconds=3.0)
BLOCK = 16  # steps of a device that follow each other


def measure_cell(generator: Generator, step_bytes: StepBytes, batch: int, context: int, gb_per_s: float) -> dict[str, Any]:
    """One batch size and context length; times in ms, each with its spread.

    Prefill runs `batch` prompts of `context` tokens, with the bundle's schedule. A variant's step feeds one token a row on top of
    `context` valid positions (of a block, the first), with the variants taking turns; its gain is the median of the rounds'
    ratios to full depth.

    Args:
        gb_per_s: bandwidth of the memory that weights and KV buffer lie in, 1e9 bytes a second.

    Returns:
        batch, context; prefill_ms; variants, the deepest first: name, layers, ms, read_bytes (of a step: weights and KV buffer),
        bound_ms (what reading them takes at least), share_of_bound (bound over median), promised_gain (by bytes), gain. Each of
        prefill_ms, ms and gain is a `Summary`'s fields.
    """
    prefill = _measure_prefill(generator, batch, context)
    counts = sorted((variant.num_layers for variant in generator.manifest.variants), reverse=True)
    steps = _steps(generator)
    times = (_measure_steps if steps == 1 else _measure_blocks)(generator, counts, batch, context)
    full = np.array(times[counts[0]])
    middle = context + steps // 2
    full_bytes = step_bytes.of(counts[0], batch, middle)
    rows = []
    for count in counts:
        size = step_bytes.of(count, batch, middle)
        bound = size / gb_per_s / 1e6
        found = Summary.of(times[count])
        rows.append({
            "name": f"v{count}", "layers": count, "ms": asdict(found), "read_bytes": size, "bound_ms": bound,
            "share_of_bound": bound / found.median, "promised_gain": full_bytes / size,
            "gain": asdict(Summary.of((full / np.array(times[count])).tolist())),
        })  # fmt: skip
    return {"batch": batch, "context": context, "prefill_ms": asdict(prefill), "variants": rows}


def _measure_prefill(generator: Generator, batch: int, context: int) -> Summary:
    decoder = generator.decoder([context] * batch, 1)
    prompts = _random_ids(generator, (batch, context)).tolist()

    def run() -> float:
        started = time.perf_counter()
        decoder.prefill(prompts)
        return 1e3 * (time.perf_counter() - started)

    return Summary.of(interleave({"prefill": run}, PREFILL)["prefill"])


def most_context(generator: Generator) -> int:
    """Valid tokens a row on top of which every variant can be measured."""
    most, slots = generator.manifest.limits.max_length, generator.engines.slots
    return min(most, *(slots or (most,))) - max(len(generator.manifest.variants), _steps(generator))


def _steps(generator: Generator) -> int:
    """On top of a context, in one measurement."""
    on_device = generator.engines.turn_around is not None
    return max(2, min(BLOCK, generator.manifest.limits.max_length // 2)) if on_device else 1


def time_block(loop: DeviceLoop, position: int, context: int, steps: int) -> tuple[float, float]:
    """`steps` steps from `position` on, the first on top of `context` valid tokens a row.

    Returns:
        ms a step; us that the host takes to ask for one.
    """
    loop.rewind(position, context)
    loop.wait()
    started = time.perf_counter()
    for _ in range(steps):
        loop.step()
    asked = time.perf_counter()
    loop.wait()
    return 1e3 * (time.perf_counter() - started) / steps, 1e6 * (asked - started) / steps


def tour(own: Schedule, counts: Sequence[int], steps: int = 1) -> Schedule:
    """Each variant for `steps` positions: one KV buffer serves them all, as it does in a run."""
    layers = tuple(count for count in counts for _ in range(steps))
    return Schedule(name="table", num_layers=own.num_layers, warmup_layers=own.warmup_layers, layers=layers)


def _measure_blocks(generator: Generator, counts: list[int], batch: int, context: int) -> dict[int, list[float]]:
    """ms of each variant's step on a device, a value a round."""
    steps = _steps(generator)
    loop = generator.device_loop([context] * batch, steps, tour(generator.manifest.schedule, counts, steps))

    def measure(position: int) -> Callable[[], float]:
        return lambda: time_block(loop, position, context, steps)[0]

    return interleave({count: measure(index * steps) for index, count in enumerate(counts)}, DECODE)


def _measure_steps(generator: Generator, counts: list[int], batch: int, context: int) -> dict[int, list[float]]:
    """ms of each variant's step on the CPU, a value a round."""
    decoder = generator.decoder([context] * batch, len(counts), tour(generator.manifest.schedule, counts))
    tokens = _random_ids(generator, (batch,))
    return interleave({count: _step_at(decoder, t, context, tokens) for t, count in enumerate(counts)}, DECODE)


def _step_at(decoder: Decoder, position: int, context: int, tokens: np.ndarray[Any, np.dtype[np.int64]]) -> Callable[[], float]:
    def run() -> float:
        decoder.rewind(position, context)
        started = time.perf_counter()
        decoder.decode_step(tokens)
        return 1e3 * (time.perf_counter() - started)

    return run


def _random_ids(generator: Generator, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(0).integers(0, generator.manifest.model.vocab_size, shape)
