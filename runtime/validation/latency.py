"""Prefill and every variant's decode step, over batch and context."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from skipdecode.decoder import Decoder
from skipdecode.generate import Generator
from skipdecode.schedule import Schedule
from skipdecode.validation.samples import Effort, Summary, interleave
from skipdecode.validation.step_bytes import StepBytes

DECODE = Effort(rounds=10)
PREFILL = Effort(rounds=3, spread=0.05, seconds=3.0)


def measure_cell(generator: Generator, step_bytes: StepBytes, batch: int, context: int, gb_per_s: float) -> dict[str, Any]:
    """One batch size and context length; times in ms, each with its spread.

    Prefill runs `batch` prompts of `context` tokens, with the bundle's schedule. A variant's step feeds one token a row on top of
    `context` valid positions, with the variants taking turns; its gain is the median of the rounds' ratios to full depth.
    """
    prefill = _measure_prefill(generator, batch, context)
    counts = sorted((variant.num_layers for variant in generator.manifest.variants), reverse=True)
    times = _measure_variants(generator, counts, batch, context)
    full = np.array(times[counts[0]])
    full_bytes = step_bytes.of(counts[0], batch, context)
    rows = []
    for count in counts:
        size = step_bytes.of(count, batch, context)
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


def _measure_variants(generator: Generator, counts: list[int], batch: int, context: int) -> dict[int, list[float]]:
    """ms of each variant's step, a value a round."""
    own = generator.manifest.schedule
    # a position a variant: one KV buffer serves them all, as it does in a run
    tour = Schedule(name="table", num_layers=own.num_layers, warmup_layers=own.warmup_layers, layers=tuple(counts))
    decoder = generator.decoder([context] * batch, len(counts), tour)
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
