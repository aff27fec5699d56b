"""How fast is a decode step on a GPU? OPT's shapes of 1.3B and 6.7B parameters, random weights in fp16, one NVIDIA GPU.

One run: each variant of a bundle that computes all layers, a half, a third, a quarter and a fifth of them (what schedules of
1x to 5x compute on average), against transformers on a static cache, eager and with its step through torch.compile (CUDA
graphs). Rows x valid positions: 1, 8, 32 x 128, 1024. Each system in its own process, taking turns. Also told: bytes a step over
the copy bandwidth that torch measures, the gain that the bytes promise, time outside engines, what is not measured and why.

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

from gpu_systems import Ours, TorchSteps, copy_gb_per_s, device_facts
from machine import facts, write_results
from models import make_checkpoint
from plot import plot
from summary import decode_times
from worker import Worker, in_process

_MODELS, _POINTS, _SPEEDUPS = "opt-1.3b,opt-6.7b", "1x128,8x128,32x128,1x1024,8x1024,32x1024", (1, 2, 3, 4, 5)
_NOT_HERE = {
    "tensorrt-rtx, tensorrt": "this version compiles plans and does not run them",
    "one engine for a whole variant": "exports cut a variant into segments; the price of the cut is not measured",
}


def main() -> int:
    """Measure, print tables and one JSON line, write results/."""
    options = _options()
    device = {"gpu": "none"} if options.smoke else in_process(device_facts)
    if isinstance(device, str):
        print(f"gpu.py: {device}", file=sys.stderr)
        return 2
    settings = {"points": options.points, "rounds": options.rounds, "speedups": _SPEEDUPS, "smoke": options.smoke}
    result: dict[str, Any] = {"machine": facts() | device, "settings": settings, "not_measured": _NOT_HERE, "models": {}}
    try:
        for name in options.models:
            with tempfile.TemporaryDirectory(prefix="skipdecode-bench-") as folder:
                result["models"][name] = _measure_model(name, Path(folder), options)
    finally:  # as in decode.py: what is whole of a model is not lost with the next one
        if result["models"] and not options.smoke:
            path = write_results("gpu", result)
            plot(result, path.with_suffix(".png"), f"A decode step in fp16, {result['machine']['gpu']}, systems take turns")
    print(json.dumps(result))
    return 0


def _measure_model(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    bundle, device = folder / "bundle", "cpu" if options.smoke else "cuda"
    export_s = in_process(_export, name, folder, bundle, options.smoke)
    gb_per_s = in_process(copy_gb_per_s, device, 16 if options.smoke else 2048)
    ours = Worker(Ours, bundle, device, gb_per_s)
    peers = {"transformers static cache": Worker(TorchSteps, bundle, device, False)}
    if not options.smoke:
        peers["transformers static cache, torch.compile"] = Worker(TorchSteps, bundle, device, True)
    figures: dict[str, Any] = {"export_s": export_s, "copy_gb_per_s": gb_per_s, "points": []}
    for batch, context in (map(int, point.split("x")) for point in options.points):
        cells, steps = [], {peer: [] for peer in peers}  # type: ignore[var-annotated]
        for _ in range(options.rounds):
            cells.append(ours.call("cell", batch, context))
            for peer, worker in peers.items():
                steps[peer].append(worker.call("step_ms", batch, context))
        figures["points"].append(_point(batch, context, cells, steps))
        _show(name, figures["points"][-1])
    figures["outside_engines_us"] = ours.call("outside_engines_us", 1, 32)
    for worker in (ours, *peers.values()):
        worker.close()
    return figures


def _export(name: str, folder: Path, bundle: Path, tiny: bool) -> float:
    """Seconds."""
    from skipdecode.exporter.export import ExportRequest, export
    from skipdecode.exporter.model_names import load_config
    from skipdecode.schedule_builders import ScheduleRequest

    if tiny:
        make_checkpoint("opt", folder / "checkpoint", True)
    model = str(folder / "checkpoint") if tiny else name
    layers = load_config(model)[0].num_hidden_layers
    counts = [max(2, round(layers / speedup)) for speedup in _SPEEDUPS]
    (folder / "table.json").write_text(json.dumps({"layers": counts, "warmup_layers": 1}), encoding="utf-8")
    started = time.perf_counter()
    export(ExportRequest(
        model=model, out=bundle, random_weights=not tiny, targets=("cuda",), dtype="fp16",
        schedule=ScheduleRequest(name=f"table:{folder / 'table.json'}"), slim=True, max_batch=32,
    ))  # fmt: skip
    return round(time.perf_counter() - started, 1)


def _point(batch: int, context: int, cells: list[dict[str, Any]], steps: dict[str, list[float]]) -> dict[str, Any]:
    """Medians over the rounds, with the fastest and slowest; ratios round by round."""
    rows = []
    for index, variant in enumerate(cells[0]["variants"]):
        found = [cell["variants"][index] for cell in cells]
        rows.append(
            {"system": f"skipdecode {variant['name']}", "kind": "fp16"}
            | decode_times([each["ms"]["median"] for each in found])
            | {
                "layers": variant["layers"],
                "read_bytes": variant["read_bytes"],
                "share_of_copy_bandwidth": statistics.median(each["share_of_bound"] for each in found),
                "gain": statistics.median(each["gain"]["median"] for each in found),
                "promised_gain": variant["promised_gain"],
            }
        )
    full = [cell["variants"][0]["ms"]["median"] for cell in cells]
    for peer, times in steps.items():
        ratio = statistics.median(theirs / ours for theirs, ours in zip(times, full, strict=True))
        rows.append({"system": peer, "kind": "fp16"} | decode_times(times) | {"skipdecode_full_depth_times_as_fast": ratio})
    prefill = statistics.median(cell["prefill_ms"]["median"] for cell in cells)
    return {"batch": batch, "context": context, "rounds": len(cells), "prefill_ms": prefill, "systems": rows}


def _show(name: str, point: dict[str, Any]) -> None:
    print(f"\n{name}, {point['batch']} rows on {point['context']} positions, ms a step (prompts {point['prefill_ms']:.1f} ms)")
    for row in point["systems"]:
        text = f"  {row['system']:42}{row['decode_ms_per_step']:9.3f}"
        if "gain" in row:
            text += f"  {row['gain']:.2f}x of {row['promised_gain']:.2f}x  {row['share_of_copy_bandwidth']:.0%} of copy bandwidth"
        else:
            text += f"  full depth here: {row['skipdecode_full_depth_times_as_fast']:.2f}x as fast"
        print(text)


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
