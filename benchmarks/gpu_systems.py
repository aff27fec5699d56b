"""What gpu.py compares, one small class a system, each in its own process; and what it must know of the GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engine_time import engine_time

_STEPS, _WARM_UP = 32, 3  # of a peer at each turn; torch.compile compiles at the first two


class Ours:
    """This runtime's engines for the CUDA provider; on the device `cpu` the same engines, to see that they run."""

    def __init__(self, bundle: Path, device: str, gb_per_s: float) -> None:
        import torch  # noqa: F401  its CUDA libraries are what ONNX Runtime finds

        from skipdecode import manifest
        from skipdecode.engines.ort import use_threads
        from skipdecode.targets import load_device_engines
        from skipdecode.validation.step_bytes import StepBytes

        self.manifest = manifest.read(bundle)
        target = next(target for target in self.manifest.targets if target.name == "cuda")
        use_threads(None)
        self._engines = load_device_engines(self.manifest, bundle, target, device)
        self._bytes, self._gb_per_s = StepBytes(manifest=self.manifest, target=target), gb_per_s

    def decoder(self, prompt_lengths: Sequence[int], new: int, schedule: Any = None) -> Any:
        """As `Generator.decoder`."""
        from skipdecode.decoder import Decoder

        return Decoder(self._engines, self.manifest.model, schedule or self.manifest.schedule, prompt_lengths, new)

    def cell(self, batch: int, context: int) -> dict[str, Any]:
        """As skip-validate measures it."""
        from skipdecode.validation.latency import measure_cell

        return measure_cell(self, self._bytes, batch, context, self._gb_per_s)  # type: ignore[arg-type]

    def outside_engines_us(self, batch: int, context: int) -> dict[str, float]:
        """Median microseconds of a full-depth step that are not spent in an engine call."""
        from skipdecode.schedule import full_depth

        outside, tokens = [], np.full(batch, 5)
        with engine_time() as counted:
            decoder = self.decoder([context] * batch, _STEPS, full_depth(self.manifest.model.num_layers))
            decoder.prefill([[5] * context] * batch)
            for _ in range(_STEPS):
                before, started = counted.seconds, time.perf_counter()
                decoder.decode_step(tokens)
                outside.append(1e6 * (time.perf_counter() - started - (counted.seconds - before)))
        return {"median": statistics.median(outside)}


class TorchSteps:
    """transformers' model of the bundle's shape, random weights, on a static cache; its step eager or compiled."""

    def __init__(self, bundle: Path, device: str, compiled: bool) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

        self._torch, self._cache_of = torch, StaticCache
        torch.set_default_device(device)
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(bundle), dtype=torch.float16).eval()
        self._step = torch.compile(self._model.forward, mode="reduce-overhead") if compiled else self._model.forward

    def step_ms(self, batch: int, context: int) -> float:
        """Median milliseconds of a step that feeds one token a row on top of `context` valid positions and a few more."""
        torch = self._torch
        cache = self._cache_of(config=self._model.config, max_cache_len=context + _WARM_UP + _STEPS)
        ids, positions, times = torch.full((batch, context), 5), torch.arange(context)[None], []
        with torch.no_grad():
            self._model(ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
            newest = ids[:, :1]
            for step in range(_WARM_UP + _STEPS):
                at = torch.tensor([[context + step]])
                started = time.perf_counter()
                out = self._step(newest, position_ids=at, past_key_values=cache, use_cache=True, logits_to_keep=1)
                newest = out.logits[:, -1:].argmax(-1)
                newest.cpu()  # waits for it, as a loop that streams tokens does
                times.append(1e3 * (time.perf_counter() - started))
        return statistics.median(times[_WARM_UP:])


def copy_gb_per_s(device: str, mib: int) -> float:
    """Bytes read and written a second by torch's copy of `mib` MiB, the best of ten."""
    import torch

    source = torch.zeros(mib << 20, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), 0.0
    for _ in range(10):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2 * source.nbytes / (time.perf_counter() - started) / 1e9)
    return best


def device_facts() -> dict[str, Any] | str:
    """The GPU's name and versions, or one line that says what is missing."""
    import onnxruntime as ort
    import torch

    if not torch.cuda.is_available():
        return "torch finds no GPU; run this on a machine with one, with torch's CUDA build"
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        return "the installed onnxruntime has no CUDA provider; pip uninstall onnxruntime, then pip install onnxruntime-gpu"
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
