"""What gpu.py compares, one small class a system, each in its own process; and what it must know of the GPU."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

_STEPS, _WARM_UP = 32, 3  # of a peer at each turn; torch.compile compiles at the first two


class Ours:
    """This runtime on a target of a bundle; on the device `cpu` the cuda engines, to see that they run."""

    def __init__(self, bundle: Path, target: str, device: str) -> None:
        import torch  # noqa: F401  its CUDA libraries are what ONNX Runtime finds

        from skipdecode import manifest
        from skipdecode.targets import load_engines
        from skipdecode.validation.step_bytes import StepBytes

        self.manifest = manifest.read(bundle)
        chosen = next(each for each in self.manifest.targets if each.name == target)
        self._engines = (
            load_engines(self.manifest, bundle, chosen, None, None) if device == "cuda" else self._on_cpu(bundle, chosen)
        )
        self._bytes = StepBytes(manifest=self.manifest, target=chosen)

    def _on_cpu(self, bundle: Path, target: Any) -> Any:
        import ctypes

        from skipdecode.device import HostDevice
        from skipdecode.engines.ort import use_threads
        from skipdecode.plugins import turnaround
        from skipdecode.targets import load_device_engines

        use_threads(None)
        library = turnaround.build(bundle.parent / "turnaround.so", device=False)
        run = lambda state: library.skd_turnaround_host(ctypes.byref(state))  # noqa: E731
        return load_device_engines(self.manifest, bundle, target, HostDevice(), run)

    def cell(self, batch: int, context: int, rounds: int) -> dict[str, Any]:
        """Prompts of `context` tokens, then `BLOCK` steps of each variant on top, again and again: ms of each, medians' source.

        A step is what a run does: the captured graph of embedding, segments, head and turn-around. The host enqueues a block
        and waits for its end; `host_us` is what enqueuing a step takes it.
        """
        from skipdecode.decoder import Decoder
        from skipdecode.device_loop import DeviceLoop
        from skipdecode.sampling import Sampling
        from skipdecode.validation.latency import BLOCK, time_block, tour

        counts = sorted((variant.num_layers for variant in self.manifest.variants), reverse=True)
        stairs = tour(self.manifest.schedule, counts, BLOCK)
        decoder = Decoder(self._engines, self.manifest.model, stairs, [context] * batch, BLOCK)
        loop = DeviceLoop(decoder, self._engines.turn_around, stop_count=0, max_steps=BLOCK, graphs=True)
        prefill_ms: list[float] = []
        blocks: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
        prompts = np.random.default_rng(0).integers(0, self.manifest.model.vocab_size, (batch, context)).tolist()
        for _ in range(rounds + 1):
            started = time.perf_counter()
            loop.begin(prompts, Sampling(), np.arange(batch), ())
            loop.wait()
            prefill_ms.append(1e3 * (time.perf_counter() - started))
            for index, count in enumerate(counts):
                blocks[count].append(time_block(loop, BLOCK * index, context, BLOCK))
        rows = [
            {
                "name": f"v{count}",
                "layers": count,
                "ms": [ms for ms, _ in blocks[count][1:]],
                "host_us": [us for _, us in blocks[count][1:]],
                "read_bytes": self._bytes.of(count, batch, context + BLOCK // 2),
            }
            for count in counts
        ]  # without the first round, which captures
        return {"prefill_ms": prefill_ms[1:], "variants": rows}


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


def bandwidth(device: str) -> float:
    """GB/s that a copy within the device reads and writes."""
    from skipdecode.cuda import CudaDevice
    from skipdecode.device import HostDevice
    from skipdecode.validation.machine import copy_gb_per_s

    return copy_gb_per_s(CudaDevice(), mib=2048) if device == "cuda" else copy_gb_per_s(HostDevice(), mib=16)


def device_facts() -> dict[str, Any] | str:
    """The GPU's name, capability and versions, or one line that says what is missing."""
    import torch

    if not torch.cuda.is_available():
        return "torch finds no GPU; run this on a machine with one, with torch's CUDA build"
    major, minor = torch.cuda.get_device_capability()
    return {"gpu": torch.cuda.get_device_name(), "capability": f"sm{major}{minor}", "cuda": torch.version.cuda}


def refused(target: str) -> str | None:
    """Why engines for `target` cannot be made and run here, in its own words; None: they can."""
    from skipdecode.engines.ort import check_cuda
    from skipdecode.errors import TargetError
    from skipdecode.exporter.targets import parse_targets

    try:
        parse_targets([target])
        if target == "cuda":
            check_cuda()
    except TargetError as error:
        return str(error)
    return None
