"""How long does choosing a token take? This runtime against transformers' warpers and a draw, for 1 row and 16, taking turns.

On the host this measures `runtime/sampling.py`. On a GPU (`--device cuda`) it measures the turn-around's kernel, 20 launches in a
row, and as many choices by transformers. Logits are synthetic: `peaked` like a trained model's (probabilities fall with the 1.5th
power of the rank, 3 nats of entropy), or `flat` like an untrained one's (8 nats), which keeps many tokens.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import machine
import numpy as np
import torch
from gpu_systems import device_facts, host_turn_around
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from skipdecode.cuda import CudaDevice
from skipdecode.device import HostDevice
from skipdecode.memory import DeviceMemory
from skipdecode.sampling import Sampling, choose_tokens
from skipdecode.turn_around import SkdSampling, SkdTurnaround, TurnAround

SAMPLINGS = {
    "greedy": Sampling(),
    "temperature 1": Sampling(do_sample=True),
    "top_p 0.95": Sampling(do_sample=True, top_p=0.95),
    "top_k 50, top_p 0.95, temperature 0.8": Sampling(do_sample=True, temperature=0.8, top_k=50, top_p=0.95),
}
_CONSECUTIVE = 20  # choices on a GPU, waited for only after the last

Logits = np.ndarray[tuple[int, int], np.dtype[np.float32]]


def main() -> int:
    """Measure, write the results, and print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the logits are (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a small vocabulary, the GPU's code on the host, nothing written")
    options = parser.parse_args()
    device = device_facts() if options.device == "cuda" and not options.smoke else {}
    if isinstance(device, str):
        print(f"choosing.py: {device}", file=sys.stderr)
        return 2
    torch.set_num_threads(2)
    cases = [
        _measure(vocabulary, rows, shape, name, options)
        for vocabulary in ((500,) if options.smoke else (8192, 50272, 128256)) for rows in (1, 16) for shape in ("peaked", "flat")
        for name in SAMPLINGS
    ]  # fmt: skip
    for case in cases:
        print(f"{case['vocabulary']:6} x {case['rows']:2} {case['logits']:6} {case['sampling']:38} {case['ms']:8.3f} ms, "
              f"transformers {case['transformers_ms']:8.3f} ms, {case['times_as_fast_as_transformers']:.1f}x")  # fmt: skip
    if options.smoke:
        print(json.dumps({"cases": cases}))
    else:
        print(machine.write_results("choosing", {"machine": machine.facts() | device, "cases": cases}))
    return 0


def _measure(vocabulary: int, rows: int, shape: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    ranks = rng.permuted(np.tile(np.arange(vocabulary), (rows, 1)), axis=1) + 1.0
    noise = rng.normal(0, 0.5 if shape == "peaked" else 2.5, ranks.shape)
    logits = (noise - (1.5 * np.log(ranks) if shape == "peaked" else 0)).astype(np.float32)
    on_gpu = options.device == "cuda"
    where = "cpu" if options.smoke else options.device
    ours = _Kernel(logits, SAMPLINGS[name], where) if on_gpu else _Host(logits, SAMPLINGS[name])
    theirs = _transformers(torch.from_numpy(logits).to(where), SAMPLINGS[name])
    wait_theirs = torch.cuda.synchronize if where == "cuda" else lambda: None
    block = _CONSECUTIVE if on_gpu else 1
    pairs = [
        (_ms(ours, ours.wait, block), _ms(theirs, wait_theirs, block)) for _ in range(3 if options.smoke else 12)
    ][1:]  # the first allocates  # fmt: skip
    return {
        "vocabulary": vocabulary, "rows": rows, "logits": shape, "sampling": name,
        "ms": statistics.median(a for a, _ in pairs), "transformers_ms": statistics.median(b for _, b in pairs),
        "times_as_fast_as_transformers": statistics.median(b / a for a, b in pairs),
    }  # fmt: skip


class _Host:
    def __init__(self, logits: Logits, sampling: Sampling) -> None:
        self._logits, self._sampling, self._rows, self._step = logits, sampling, np.arange(len(logits)), 0

    def __call__(self) -> None:
        choose_tokens(self._logits, self._sampling, self._rows, self._step)
        self._step += 1

    def wait(self) -> None:
        pass


class _Kernel:
    """The turn-around's kernel on a GPU; if `where` is "cpu", its host version."""

    def __init__(self, logits: Logits, sampling: Sampling, where: str) -> None:
        self._device, self._run = _device(where)
        memory, rows = DeviceMemory(self._device, "float16"), len(logits)
        settings = bytes(SkdSampling.of(sampling)) * rows
        arrays = {name: np.zeros(rows, np.int64) for name in ("row_ids", "stop_ids", "input_ids", "position_ids", "tokens")}
        arrays |= {name: np.zeros(rows, np.int32) for name in ("steps", "seqlens_k", "finished")}
        arrays |= {"logits": logits, "sampling": np.frombuffer(settings, np.uint8)}
        self._twins = {name: memory.twin(array)[0] for name, array in arrays.items()}
        self._state = SkdTurnaround(
            rows=rows, vocabulary=logits.shape[1], kept_steps=1, stop_count=0,
            **{name: twin.pointer for name, twin in self._twins.items()},
        )  # fmt: skip

    def __call__(self) -> None:
        self._run(self._state)

    def wait(self) -> None:
        self._device.mark()()


@functools.cache
def _device(where: str) -> tuple[CudaDevice | HostDevice, TurnAround]:
    if where == "cpu":
        return HostDevice(), host_turn_around()
    device = CudaDevice()
    return device, device.turn_around()


def _transformers(logits: torch.Tensor, sampling: Sampling) -> Callable[[], None]:
    """A choice of tokens as `generate` makes it."""
    warpers: list[Any] = []
    if sampling.temperature != 1:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))

    def choose() -> None:
        scores = logits
        for warper in warpers:
            scores = warper(None, scores)
        if sampling.do_sample:
            torch.multinomial(torch.softmax(scores, dim=-1), 1)
        else:
            torch.argmax(scores, dim=-1)

    return choose


def _ms(choose: Callable[[], None], wait: Callable[[], Any], times: int) -> float:
    """Milliseconds per choice."""
    started = time.perf_counter()
    for _ in range(times):
        choose()
    wait()
    return 1000 * (time.perf_counter() - started) / times


if __name__ == "__main__":
    sys.exit(main())
