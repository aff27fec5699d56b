"""Prefill and every variant's decode step, over batch and context.

A step is timed as a run executes it. On the CPU it is a call that is waited for. On a device with a turn-around it is one of a
block of steps, each a captured graph: the host enqueues them one after another and waits for the last.
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
BLOCK = 16  # consecutive steps on a device that are timed together


def measure_cell(generator: Generator, step_bytes: StepBytes, batch: int, context: int, gb_per_s: float) -> dict[str, Any]:
    """Measure one batch size and context length; times in ms, each with its spread.

    Prefill runs `batch` prompts of `context` tokens, with the bundle's schedule. A variant's step (the first one of a block)
    feeds one token a row on top of `context` valid positions. The variants take turns, and a variant's gain over full depth is
    the median of the rounds' ratios.

    Args:
        gb_per_s: bandwidth of the memory that holds weights and KV buffer, 1e9 bytes a second.

    Returns:
        batch, context; prefill_ms; variants, deepest first: name, layers, ms, read_bytes (weights and KV buffer that a step
        reads), bound_ms (the least time that reading them takes), share_of_bound (bound over median), promised_gain (by bytes),
        gain. Each of prefill_ms, ms and gain holds a `Summary`'s fields.
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
        step_ms = Summary.of(times[count])
        rows.append({
            "name": f"v{count}", "layers": count, "ms": asdict(step_ms), "read_bytes": size, "bound_ms": bound,
            "share_of_bound": bound / step_ms.median, "promised_gain": full_bytes / size,
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


def max_context(generator: Generator) -> int:
    """The most valid tokens a row on top of which every variant can be measured."""
    max_length, slots = generator.manifest.limits.max_length, generator.engines.slots
    return min(max_length, *(slots or (max_length,))) - max(len(generator.manifest.variants), _steps(generator))


def _steps(generator: Generator) -> int:
    """How many steps one measurement takes on top of a context."""
    on_device = generator.engines.turn_around is not None
    return max(2, min(BLOCK, generator.manifest.limits.max_length // 2)) if on_device else 1


def time_block(loop: DeviceLoop, position: int, context: int, steps: int) -> tuple[float, float]:
    """Time `steps` steps from `position` on, the first on top of `context` valid tokens a row.

    Returns:
        ms a step; us that the host takes to enqueue one.
    """
    loop.rewind(position, context)
    loop.wait()
    started = time.perf_counter()
    for _ in range(steps):
        loop.step()
    enqueued = time.perf_counter()
    loop.wait()
    return 1e3 * (time.perf_counter() - started) / steps, 1e6 * (enqueued - started) / steps


def tour(own: Schedule, counts: Sequence[int], steps: int = 1) -> Schedule:
    """A schedule that runs each variant for `steps` positions, so that one KV buffer serves them all, as in a run."""
    layers = tuple(count for count in counts for _ in range(steps))
    return Schedule(name="table", num_layers=own.num_layers, warmup_layers=own.warmup_layers, layers=layers)


def _measure_blocks(generator: Generator, counts: list[int], batch: int, context: int) -> dict[int, list[float]]:
    """ms of each variant's step on a device, one value per round."""
    steps = _steps(generator)
    loop = generator.device_loop([context] * batch, steps, tour(generator.manifest.schedule, counts, steps))

    def measure(position: int) -> Callable[[], float]:
        return lambda: time_block(loop, position, context, steps)[0]

    return interleave({count: measure(index * steps) for index, count in enumerate(counts)}, DECODE)


def _measure_steps(generator: Generator, counts: list[int], batch: int, context: int) -> dict[int, list[float]]:
    """ms of each variant's step on the CPU, one value per round."""
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
