"""What does choosing a token take? `runtime/sampling.py` against transformers' own warpers and a draw, a row at a time and 16.

Logits are made: `peaked` as a trained model's are (probabilities fall with the 1.5th power of the rank, 3 nats of entropy),
`flat` as an untrained one's (8 nats), which keeps many tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import machine
import numpy as np
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from skipdecode.sampling import Sampling, choose_tokens

SAMPLINGS = {
    "temperature 1": Sampling(do_sample=True),
    "top_p 0.95": Sampling(do_sample=True, top_p=0.95),
    "top_k 50, top_p 0.95, temperature 0.8": Sampling(do_sample=True, temperature=0.8, top_k=50, top_p=0.95),
}


def main() -> None:
    """Measure, write the results, and print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small vocabulary, nothing written")
    smoke = parser.parse_args().smoke
    torch.set_num_threads(2)
    cases = [
        _measure(vocabulary, rows, shape, name, rounds=3 if smoke else 11)
        for vocabulary in ((500,) if smoke else (8192, 50272, 128256)) for rows in (1, 16) for shape in ("peaked", "flat")
        for name in SAMPLINGS
    ]  # fmt: skip
    for case in cases:
        print(f"{case['vocabulary']:6} x {case['rows']:2} {case['logits']:6} {case['sampling']:38} {case['ms']:7.2f} ms, "
              f"transformers {case['transformers_ms']:7.2f} ms, {case['times_as_fast_as_transformers']:.1f}x")  # fmt: skip
    if smoke:
        print(json.dumps({"cases": cases}))
    else:
        print(machine.write_results("choosing", {"machine": machine.facts(), "cases": cases}))


def _measure(vocabulary: int, rows: int, shape: str, name: str, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    ranks = rng.permuted(np.tile(np.arange(vocabulary), (rows, 1)), axis=1) + 1.0
    noise = rng.normal(0, 0.5 if shape == "peaked" else 2.5, ranks.shape)
    logits = (noise - (1.5 * np.log(ranks) if shape == "peaked" else 0)).astype(np.float32)
    numbers, sampling = np.arange(rows), SAMPLINGS[name]
    ours, theirs = [], []
    warped, draw = _transformers(torch.from_numpy(logits), sampling), torch.Generator().manual_seed(0)
    for step in range(rounds):  # in turns
        ours.append(_ms(lambda step=step: choose_tokens(logits, sampling, numbers, step)))
        theirs.append(_ms(lambda: torch.multinomial(warped(), 1, generator=draw)))
    return {
        "vocabulary": vocabulary, "rows": rows, "logits": shape, "sampling": name,
        "ms": statistics.median(ours), "transformers_ms": statistics.median(theirs),
        "times_as_fast_as_transformers": statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
    }  # fmt: skip


def _transformers(logits: torch.Tensor, sampling: Sampling) -> Callable[[], torch.Tensor]:
    """Probabilities [B,V] as `generate` makes them."""
    warpers: list[Any] = []
    if sampling.temperature != 1:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))

    def probabilities() -> torch.Tensor:
        scores = logits
        for warper in warpers:
            scores = warper(None, scores)
        return torch.softmax(scores, dim=-1)

    return probabilities


def _ms(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


if __name__ == "__main__":
    main()
