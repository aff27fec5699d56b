"""The systems that gpu.py compares, one small class each, run in its own process; and what it must know about the GPU."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SPEEDUPS = (1, 2, 3, 4, 5)
_BLOCKS = 5  # blocks of steps that each variant runs in a turn
_STEPS, _WARM_UP = 36, 4  # of a peer in a turn; together a multiple of 8, because attention's kernels pad masks of other lengths
_WHOLE_BYTES = 16 << 30  # limit for a segment of all layers: more than 6.7B parameters take in fp16


def export_bundle(model: str, bundle: Path, target: str, one_engine: bool, random_weights: bool, quantize: str) -> float:
    """Export a bundle; returns seconds. `one_engine`: only full depth, in one segment."""
    from skipdecode.exporter.export import ExportRequest, export
    from skipdecode.exporter.model_names import load_config
    from skipdecode.schedule_builders import ScheduleRequest

    layers = load_config(model)[0].num_hidden_layers
    counts = [max(2, round(layers / speedup)) for speedup in SPEEDUPS]
    table = bundle.with_suffix(".json")
    table.write_text(json.dumps({"layers": counts, "warmup_layers": 1}), encoding="utf-8")
    whole = {"segment_bytes": _WHOLE_BYTES} if one_engine else {}
    started = time.perf_counter()
    export(ExportRequest(
        model=model, out=bundle, random_weights=random_weights, targets=(target,), dtype="fp16", quantize=quantize,
        slim=True, max_batch=32,
        schedule=ScheduleRequest(name="full" if one_engine else f"table:{table}"), **whole,
    ))  # fmt: skip
    return round(time.perf_counter() - started, 1)


class Ours:
    """This runtime on a bundle of one target. On the device `cpu` it runs the cuda engines, to check that they work."""

    def __init__(self, bundle: Path, device: str, one_engine: bool) -> None:
        import torch  # noqa: F401  ONNX Runtime uses its CUDA libraries

        from skipdecode import manifest
        from skipdecode.targets import load_engines
        from skipdecode.validation.step_bytes import StepBytes

        self.manifest = manifest.read(bundle)
        (target,) = self.manifest.targets
        segments = len(self.manifest.segments)
        assert not one_engine or segments == 1, f"one engine was asked for, the bundle has {segments} segments"
        self._engines = (
            load_engines(self.manifest, bundle, target, None, None) if device == "cuda" else self._on_cpu(bundle, target)
        )
        self._bytes = StepBytes(manifest=self.manifest, target=target)

    def _on_cpu(self, bundle: Path, target: Any) -> Any:
        from skipdecode.device import HostDevice
        from skipdecode.engines.ort import use_threads
        from skipdecode.targets import load_device_engines

        use_threads(1)  # more would spin while those of other systems wait for a core
        return load_device_engines(self.manifest, bundle, target, HostDevice(), host_turn_around())

    def cell(self, batch: int, context: int) -> dict[str, Any]:
        """Run prompts of `context` tokens, then repeatedly blocks of `BLOCK` steps of each variant on top.

        Returns the ms a step of each block, of which gpu_figures takes medians. A step is what a run executes: the captured graph
        of embedding, segments, head and turn-around. The host enqueues a block and waits for its end; `host_us` is the time that
        enqueuing one step takes. The first prompts and blocks are not counted: engines allocate and graphs are captured then.
        """
        cell = self._cell(batch, context)
        gc.collect()  # frees the KV buffer before another system needs the memory
        return cell

    def _cell(self, batch: int, context: int) -> dict[str, Any]:
        from skipdecode.decoder import Decoder
        from skipdecode.device_loop import DeviceLoop
        from skipdecode.validation.latency import BLOCK, time_block, tour

        counts = sorted((variant.num_layers for variant in self.manifest.variants), reverse=True)
        stairs = tour(self.manifest.schedule, counts, BLOCK)
        decoder = Decoder(self._engines, self.manifest.model, stairs, [context] * batch, BLOCK)
        loop = DeviceLoop(decoder, self._engines.turn_around, stop_count=0, max_steps=BLOCK, graphs=True)
        prompts = np.random.default_rng(0).integers(0, self.manifest.model.vocab_size, (batch, context)).tolist()
        prefill_ms = [_prefill_ms(loop, prompts) for _ in range(2)]
        blocks: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
        for _ in range(_BLOCKS + 1):
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
        ]
        # graphs: 0 if steps were launched call by call
        return {"prefill_ms": prefill_ms[1], "variants": rows, "graphs": loop.graphs}


def host_turn_around() -> Any:
    """The turn-around's host version, to check without a GPU that the code which a GPU runs works."""
    import ctypes

    from skipdecode.plugins import turnaround

    with tempfile.TemporaryDirectory() as folder:  # a loaded library no longer needs its file
        library = turnaround.build(Path(folder) / "turnaround.so", device=False)
    return lambda state: library.skd_turnaround_host(ctypes.byref(state))


def _prefill_ms(loop: Any, prompts: list[list[int]]) -> float:
    from skipdecode.sampling import Sampling

    started = time.perf_counter()
    loop.begin(prompts, Sampling(), np.arange(len(prompts)), ())
    loop.wait()
    return 1e3 * (time.perf_counter() - started)


class TorchSteps:
    """transformers' model with random weights on a static cache; its step is eager or compiled.

    A compiled step is compiled for one batch size and one cache length, as `generate` would for a run's own cache. Left to
    itself, dynamo treats the second point's sizes as dynamic, with slower kernels.
    """

    def __init__(self, model: str, device: str, compiled: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from skipdecode.exporter.model_names import load_config

        self._torch, self._compiled = torch, compiled
        torch.set_default_device(device)
        if device == "cpu":
            torch.set_num_threads(1)  # as for this runtime
        self._model = AutoModelForCausalLM.from_config(load_config(model)[0], dtype=torch.float16).eval()
        # on a CPU figures mean nothing: this only checks that a step is one graph
        self._compile_options = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "eager"}
        self._step, self._cache = self._model.forward, None
        self._point: tuple[int, int] | None = None

    def cell(self, batch: int, context: int) -> dict[str, Any]:
        """Median milliseconds of a step that feeds one token a row on top of `context` valid positions and a few more."""
        self._prepare(batch, context)
        with self._torch.no_grad():
            times = self._times(batch, context)
        result = {"ms": statistics.median(times[_WARM_UP:])}
        if self._compiled:
            return result | self._compilation()
        self._release()
        return result

    def _prepare(self, batch: int, context: int) -> None:
        from transformers import StaticCache

        if self._point == (batch, context):
            self._cache.reset()
            return
        self._release()
        self._point = (batch, context)
        if self._compiled:
            self._step = self._torch.compile(self._model.forward, dynamic=False, **self._compile_options)
        self._cache = StaticCache(config=self._model.config, max_cache_len=context + _WARM_UP + _STEPS)

    def _times(self, batch: int, context: int) -> list[float]:
        torch, times = self._torch, []
        ids = torch.full((batch, context), 5)
        shared = {"cache": self._cache, "use_cache": True, "logits_to_keep": 1}
        self._model(ids, position_ids=torch.arange(context)[None], **shared)
        newest, at = torch.full((batch, 1), 5), torch.tensor([[context]])
        slots = torch.arange(context + _WARM_UP + _STEPS).expand(batch, 1, 1, -1)
        for _ in range(_WARM_UP + _STEPS):
            started = time.perf_counter()
            torch.compiler.cudagraph_mark_step_begin()
            # with a mask, as from generate: without one OPT makes its own, whose length it reads from the device, which waits
            # for the device in every step and breaks a compiled step into many graphs
            out = self._step(newest, position_ids=at, attention_mask=slots <= at, **shared)
            newest = out.logits[:, -1:].argmax(-1)
            at += 1
            newest.cpu()  # waits for the token, as a loop that streams does
            times.append(1e3 * (time.perf_counter() - started))
        return times

    def _compilation(self) -> dict[str, int]:
        """Counters that show whether a step was one CUDA graph: one graph, no break, no skip."""
        from torch._dynamo.utils import counters

        breaks, skips = sum(counters["graph_break"].values()), counters["inductor"]["cudagraph_skips"]
        return {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": breaks, "cudagraph_skips": skips}

    def _release(self) -> None:
        """Release the cache and what was compiled for it: the GPU lacks room for every system's at once."""
        from torch._dynamo.utils import counters

        self._cache, self._point, self._step = None, None, self._model.forward
        if self._compiled:
            self._torch._dynamo.reset()
            counters.clear()
        gc.collect()
        self._torch.cuda.empty_cache()


def bandwidth(device: str) -> float:
    """GB/s that a copy within the device reads and writes, added together."""
    from skipdecode.cuda import CudaDevice
    from skipdecode.device import HostDevice
    from skipdecode.validation.machine import copy_gb_per_s

    return copy_gb_per_s(CudaDevice(), mib=2048) if device == "cuda" else copy_gb_per_s(HostDevice(), mib=16)


def device_facts() -> dict[str, Any] | str:
    """The GPU's name, capability and versions, or one line that says what is missing."""
    import torch

    if not torch.cuda.is_available():
        return "torch finds no GPU; run this on a machine with one, with torch's CUDA build"
    import onnxruntime

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": f"sm{properties.major}{properties.minor}",
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        # of the imported module: another onnxruntime may be installed besides onnxruntime-gpu
        "onnxruntime_imported": onnxruntime.__version__,
        "onnxruntime_providers": onnxruntime.get_available_providers(),
    }


def refused(target: str) -> str | None:
    """Why engines for `target` cannot be built and run here, as the error puts it; None: they can."""
    from skipdecode.engines.ort import prepare_cuda
    from skipdecode.errors import TargetError
    from skipdecode.exporter.targets import parse_targets
    from skipdecode.graph_passes.compile_tensorrt import check_gpu

    try:
        parse_targets([target])
        if target == "tensorrt":
            check_gpu(target)
        if target == "cuda":
            prepare_cuda()
    except TargetError as error:
        return str(error)
    return None
