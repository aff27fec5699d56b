"""How fast is a decode step on a GPU? OPT's shapes of 1.3B and 6.7B parameters, random weights in fp16, one NVIDIA GPU.

One run: each variant of a bundle that computes all layers, a half, a third, a quarter and a fifth of them (what schedules of
1x to 5x compute on average), on ONNX Runtime and, where it serves the GPU, on TensorRT-RTX, against transformers on a static
cache, eager and with its step through torch.compile (CUDA graphs). Rows x valid positions: 1, 8, 32 x 128, 1024. Each system in
its own process, taking turns. A step is one CUDA graph that ends with the choice of its tokens. Also told: bytes a step over the
bandwidth that a copy within the GPU reaches, the gain that the bytes promise, the host's time a step, the price of segments (the
first model as one engine against the chain of its segments), what is not measured and why.

examples:
  gpu.py                                  (both models; 8 minutes on an H200 are what it should take)
  gpu.py --models opt-1.3b --points 1x128
  gpu.py --smoke                          (a tiny model on the CPU: does it run at all; its figures mean nothing)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_systems import Ours, TorchSteps, bandwidth, device_facts, refused
from machine import facts, write_results
from models import make_checkpoint
from plot import plot
from summary import decode_times
from worker import Worker, in_process

_MODELS, _POINTS, _SPEEDUPS = "opt-1.3b,opt-6.7b", "1x128,8x128,32x128,1x1024,8x1024,32x1024", (1, 2, 3, 4, 5)
_BLOCKS = 5  # blocks of steps that each variant runs at a turn
_TENSORRT = "tensorrt-rtx"


def main() -> int:
    """Measure, print tables and one JSON line, write results/."""
    options = _options()
    device = {"gpu": "none"} if options.smoke else in_process(device_facts)
    if isinstance(device, str):
        print(f"gpu.py: {device}", file=sys.stderr)
        return 2
    wanted = ["cuda"] if options.smoke else ["cuda", f"{_TENSORRT}:{device['capability']}"]
    missing = {} if options.smoke else {target: why for target in wanted if (why := in_process(refused, target))}
    targets = [target for target in wanted if target not in missing]
    if not targets:
        print(f"gpu.py: {'; '.join(missing.values())}", file=sys.stderr)
        return 2
    settings = {"points": options.points, "rounds": options.rounds, "speedups": _SPEEDUPS, "smoke": options.smoke}
    result: dict[str, Any] = {"machine": facts() | device, "settings": settings, "not_measured": missing, "models": {}}
    try:
        for name in options.models:
            with tempfile.TemporaryDirectory(prefix="skipdecode-bench-") as folder:
                result["models"][name] = _measure_model(name, Path(folder), targets, options)
    finally:  # as in decode.py: what is whole of a model is not lost with the next one
        if result["models"] and not options.smoke:
            path = write_results("gpu", result)
            plot(result, path.with_suffix(".png"), f"A decode step in fp16, {result['machine']['gpu']}, systems take turns")
    print(json.dumps(result))
    return 0


def _measure_model(name: str, folder: Path, targets: list[str], options: argparse.Namespace) -> dict[str, Any]:
    bundle, device = folder / "bundle", "cpu" if options.smoke else "cuda"
    export_s = in_process(_export, name, folder, bundle, targets, options.smoke)
    gb_per_s = in_process(bandwidth, device)
    kinds = [target.split(":")[0] for target in targets]
    ours = {kind: Worker(Ours, bundle, kind, device) for kind in kinds}
    peers = {"transformers static cache": Worker(TorchSteps, bundle, device, False)}
    if not options.smoke:
        peers["transformers static cache, torch.compile"] = Worker(TorchSteps, bundle, device, True)
    if name == options.models[0]:
        whole = folder / "whole"
        in_process(_export, name, folder, whole, targets[:1], options.smoke, True)
        ours["one engine"] = Worker(Ours, whole, kinds[0], device)
    figures: dict[str, Any] = {"export_s": export_s, "copy_gb_per_s": gb_per_s, "points": []}
    for batch, context in (map(int, point.split("x")) for point in options.points):
        cells: dict[str, list[dict[str, Any]]] = {kind: [] for kind in ours}
        steps: dict[str, list[float]] = {peer: [] for peer in peers}
        for _ in range(options.rounds):
            for kind, worker in ours.items():
                cells[kind].append(worker.call("cell", batch, context, _BLOCKS))
            for peer, worker in peers.items():
                steps[peer].append(worker.call("step_ms", batch, context))
        figures["points"].append(_point(batch, context, cells, steps, gb_per_s))
        _show(name, figures["points"][-1])
    for worker in (*ours.values(), *peers.values()):
        worker.close()
    return figures


def _export(name: str, folder: Path, bundle: Path, targets: list[str], tiny: bool, whole: bool = False) -> float:
    """Seconds. `whole`: one segment of all layers."""
    from skipdecode.exporter.export import ExportRequest, export
    from skipdecode.exporter.model_names import load_config
    from skipdecode.schedule_builders import ScheduleRequest

    if tiny and not (folder / "checkpoint").exists():
        make_checkpoint("opt", folder / "checkpoint", True)
    model = str(folder / "checkpoint") if tiny else name
    layers = load_config(model)[0].num_hidden_layers
    counts = [max(2, round(layers / speedup)) for speedup in _SPEEDUPS]
    (folder / "table.json").write_text(json.dumps({"layers": counts, "warmup_layers": 1}), encoding="utf-8")
    started = time.perf_counter()
    export(ExportRequest(
        model=model, out=bundle, random_weights=not tiny, targets=tuple(targets), dtype="fp16",
        schedule=ScheduleRequest(name="full" if whole else f"table:{folder / 'table.json'}"), slim=True, max_batch=32,
    ))  # fmt: skip
    return round(time.perf_counter() - started, 1)


def _point(
    batch: int, context: int, cells: dict[str, list[dict[str, Any]]], steps: dict[str, list[float]], gb_per_s: float
) -> dict[str, Any]:
    """Medians over the rounds, with the fastest and slowest; ratios round by round."""
    medians = {
        (kind, index): [statistics.median(cell["variants"][index]["ms"]) for cell in found]
        for kind, found in cells.items()
        for index in range(len(found[0]["variants"]))
    }
    rows = []
    for (kind, index), times in medians.items():
        full, first = medians[kind, 0], cells[kind][0]["variants"]
        variant = first[index]
        ms = statistics.median(times)
        row = {"system": f"skipdecode {kind} {variant['name']}", "kind": "fp16"} | decode_times(times) | {
            "layers": variant["layers"],
            "read_bytes": variant["read_bytes"],
            "share_of_copy_bandwidth": variant["read_bytes"] / gb_per_s / 1e6 / ms,
            "gain": statistics.median(whole / part for whole, part in zip(full, times, strict=True)),
            "promised_gain": first[0]["read_bytes"] / variant["read_bytes"],
            "host_us": statistics.median(us for cell in cells[kind] for us in cell["variants"][index]["host_us"]),
        }  # fmt: skip
        rows.append(row)
    chain = next(iter(cells))
    for peer, times in steps.items():
        ratios = [theirs / ours for theirs, ours in zip(times, medians[chain, 0], strict=True)]
        told = {"skipdecode_full_depth_times_as_fast": statistics.median(ratios)}
        rows.append({"system": peer, "kind": "fp16"} | decode_times(times) | told)
    point = {"batch": batch, "context": context, "rounds": len(cells[chain]), "systems": rows}
    point["prefill_ms"] = {
        kind: statistics.median(ms for cell in found for ms in cell["prefill_ms"]) for kind, found in cells.items()
    }
    if "one engine" in cells:
        pairs = zip(medians[chain, 0], medians["one engine", 0], strict=True)
        point["price_of_segments"] = statistics.median(segments / one for segments, one in pairs)
    return point


def _show(name: str, point: dict[str, Any]) -> None:
    prompts = ", ".join(f"{kind} {ms:.1f}" for kind, ms in point["prefill_ms"].items())
    print(f"\n{name}, {point['batch']} rows on {point['context']} positions, ms a step (ms of prompts: {prompts})")
    for row in point["systems"]:
        text = f"  {row['system']:42}{row['decode_ms_per_step']:9.3f}"
        if "gain" in row:
            text += f"  {row['gain']:.2f}x of {row['promised_gain']:.2f}x  {row['share_of_copy_bandwidth']:.0%} of copy bandwidth"
            text += f"  {row['host_us']:.0f} us of the host"
        else:
            text += f"  full depth here: {row['skipdecode_full_depth_times_as_fast']:.2f}x as fast"
        print(text)
    if "price_of_segments" in point:
        print(f"  the chain of segments takes {point['price_of_segments']:.3f}x one engine's time")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Decode speed on a GPU.", epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=_MODELS, help="with commas (%(default)s)")
    parser.add_argument("--points", default=_POINTS, help="rows x valid positions (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns that each system takes at a point (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, nothing written")
    options = parser.parse_args()
    options.models, options.points = options.models.split(","), options.points.split(",")
    if options.smoke:
        options.models, options.points, options.rounds = ["opt"], ["1x8", "2x8"], 1
    elif {*options.models} - {*_MODELS.split(",")}:
        parser.error(f"--models: choose from {_MODELS}")
    return options


if __name__ == "__main__":
    sys.exit(main())
