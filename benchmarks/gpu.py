"""How fast is a decode step on a GPU? OPT's shapes of 1.3B and 6.7B parameters, random weights in fp16, one NVIDIA GPU.

A bundle's variants compute all layers, a half, a third, a quarter and a fifth of them (what schedules of 1x to 5x compute on
average). Each runs on ONNX Runtime and, where they are installed and support the GPU, on TensorRT-RTX and TensorRT. The peer is
transformers on a static cache, eager and with its step through torch.compile (CUDA graphs). That compiles again for each point,
so it gets only two: 1x128 and 8x128. Points are rows x valid positions: 1, 8, 32 x 128, 1024; int8 and int4 weights only at 128.
The systems take turns, each in its own process. A step is one CUDA graph that ends with the choice of its tokens. Also reported:
bytes a step over the bandwidth that a copy within the GPU reaches, the gain that the bytes promise, the host's time a step, the
price of segments (1.3B as one engine against the chain of its segments), and what is not measured and why.

What matters most comes first: this runtime's variants at one row, the price of segments, the peers at one row, quantised weights,
the other rows. The results file is rewritten after each stage, so a failure or a kill does not lose earlier results.

examples:
  gpu.py --models opt-1.3b                (one command per model: each fits into ten minutes)
  gpu.py --models opt-6.7b --minutes 9 --out results/here
  gpu.py --models opt-1.3b --points 1x128
  gpu.py --models shapes/my-llama         (a folder with a config.json; its weights are not read)
  gpu.py --smoke                          (a tiny model on the CPU: does it run at all; its figures mean nothing)
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # noqa: F401  before ONNX Runtime: each process imports this file; torch brings the CUDA libraries that both load
from gpu_figures import ONE_ENGINE, QUANTIZED, add_turns, kind_of, show
from gpu_order import Processes, Stage, stages
from gpu_systems import SPEEDUPS, Ours, TorchSteps, bandwidth, device_facts, export_bundle, refused
from machine import RESULTS, facts, write_results
from models import make_checkpoint
from worker import Worker, in_process

_MODELS, _POINTS = "opt-1.3b,opt-6.7b", "1x128,1x1024,8x128,32x128,8x1024,32x1024"
_COMPILED_AT = ("1x128", "8x128", "1x8")  # 1x8 is --smoke's
_QUANTIZED_AT = (*_COMPILED_AT, "32x128")
_EAGER, _COMPILED = "transformers static cache", "transformers static cache, torch.compile"
_PATIENCE_S = 150  # for an answer: torch.compile takes up to a minute


def main() -> int:
    """Measure, print tables and one JSON line, and write results."""
    options = _options()
    deadline = time.monotonic() + 60 * options.minutes
    device = {"gpu": "none"} if options.smoke else in_process(device_facts)
    if isinstance(device, str):
        print(f"gpu.py: {device}", file=sys.stderr)
        return 2
    all_targets = ["cuda"] if options.smoke else ["cuda", f"tensorrt-rtx:{device['capability']}", "tensorrt"]
    missing = {} if options.smoke else {target: why for target in all_targets if (why := in_process(refused, target))}
    targets = [target for target in all_targets if target not in missing]
    if not targets:
        print(f"gpu.py: {'; '.join(missing.values())}", file=sys.stderr)
        return 2
    settings = {"points": options.points, "rounds": options.rounds, "speedups": SPEEDUPS, "minutes": options.minutes}
    settings["environment"] = {name: value for name, value in os.environ.items() if name.startswith("ORT_")}  # choose kernels
    result = {"machine": facts() | device, "settings": settings, "not_measured": missing, "models": {}}
    for name in options.models:
        with tempfile.TemporaryDirectory(prefix="skipdecode-bench-") as folder:
            _measure(name, (options.bundles or Path(folder)) / Path(name).name, targets, options, deadline, result)
    _plot(result, options)
    print(json.dumps(result))
    return 0


def _measure(
    name: str, folder: Path, targets: list[str], options: argparse.Namespace, deadline: float, result: dict[str, Any]
) -> None:
    """Measure one model into `result`, under the last part of its name; results are written after each stage."""
    model_name = folder.name
    folder.mkdir(parents=True, exist_ok=True)
    if options.smoke:
        in_process(make_checkpoint, name, folder / "checkpoint", True, shared=True)
    gb_per_s = in_process(bandwidth, "cpu" if options.smoke else "cuda", shared=options.smoke)
    figures: dict[str, Any] = {"export_s": {}, "copy_gb_per_s": round(gb_per_s, 1), "points": []}
    result["models"][model_name] = figures
    makers = _makers(name, folder, targets, options.smoke, figures["export_s"])
    processes = Processes(model_name, makers, result["not_measured"], deadline)
    waiting = stages(options.points, list(makers), _takes_part)
    try:
        while waiting:
            stage = waiting.pop(0)
            cells = processes.take_turns(stage, options.rounds)
            if cells:
                point = _point(figures["points"], stage, options.rounds)
                show(model_name, point, add_turns(point, cells, gb_per_s))
            _write(result, options)
            processes.keep({system for later in waiting for system in later.systems})
    finally:
        processes.keep(set())


def _makers(
    name: str, folder: Path, targets: list[str], smoke: bool, export_s: dict[str, float]
) -> dict[str, Callable[[], Worker]]:
    """What starts each system's process, the chain of segments first. This also exports a bundle that does not exist yet."""
    model, device = (str(folder / "checkpoint"), "cpu") if smoke else (name, "cuda")

    def ours(system: str, target: str) -> Worker:
        bundle, one_engine = folder / system.replace(" ", "-"), system == ONE_ENGINE
        if not bundle.exists():
            quantize = kind_of(system) if kind_of(system) in QUANTIZED else "none"
            arguments = model, bundle, target, one_engine, not smoke, quantize
            export_s[system] = in_process(export_bundle, *arguments, shared=smoke)
        return Worker(Ours, bundle, device, one_engine, patience_s=_PATIENCE_S)

    def peer(compiled: bool) -> Worker:
        return Worker(TorchSteps, model, device, compiled, patience_s=_PATIENCE_S)

    makers: dict[str, Callable[[], Worker]] = {}
    for target in targets:
        system = target.split(":")[0]
        makers[system] = lambda system=system, target=target: ours(system, target)  # type: ignore[misc]
    if smoke or name == _MODELS.split(",")[0]:
        makers[ONE_ENGINE] = lambda: ours(ONE_ENGINE, targets[0])
    makers |= {_EAGER: lambda: peer(False), _COMPILED: lambda: peer(True)}
    kinds = QUANTIZED[-1:] if smoke else QUANTIZED  # they differ only in a number
    for target, kind in itertools.product(targets, kinds):
        system = f"{target.split(':')[0]} {kind}"
        makers[system] = lambda system=system, target=target: ours(system, target)  # type: ignore[misc]
    return makers


def _takes_part(system: str, point: str) -> bool:
    if system == ONE_ENGINE:
        return point.startswith("1x")
    if kind_of(system) != "fp16":
        return point in _QUANTIZED_AT
    return system != _COMPILED or point in _COMPILED_AT


def _point(points: list[dict[str, Any]], stage: Stage, rounds: int) -> dict[str, Any]:
    """The figures of the stage's point, added to `points` if they are not there yet."""
    existing = (point for point in points if (point["batch"], point["context"]) == (stage.batch, stage.context))
    point = next(existing, None)
    if point is None:
        point = {"batch": stage.batch, "context": stage.context, "rounds": rounds, "systems": [], "prefill_ms": {}}
        points.append(point)
    return point


def _write(result: dict[str, Any], options: argparse.Namespace) -> Path | None:
    if options.out is None:
        return None
    varied = [Path(name).name for name in options.models] if options.models != _MODELS.split(",") else []
    return write_results("-".join(["gpu", *varied]), result, options.out)


def _plot(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Plot the figures, if there are any, and write the JSON once more, now with all that was not measured."""
    path = _write(result, options)
    if path is None or not any(figures["points"] for figures in result["models"].values()):
        return
    try:
        from plot import plot

        plot(result, path.with_suffix(".png"), f"A decode step in fp16, {result['machine']['gpu']}, systems take turns")
    except ImportError as error:
        print(f"gpu.py: no plot ({error}); the figures are in {path}", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Decode speed on a GPU.", epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=_MODELS, help="comma-separated; also folders with a config.json (%(default)s)")
    parser.add_argument("--points", default=_POINTS, help="rows x valid positions (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns that each system takes at a point (%(default)s)")
    parser.add_argument("--minutes", type=float, default=8, help="after which nothing new is started (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the results (benchmarks/results)")
    parser.add_argument("--bundles", type=Path, help="folder that keeps bundles for later commands, too (a temporary one)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU; results are written only with --out")
    options = parser.parse_args()
    options.models, options.points = options.models.split(","), options.points.split(",")
    if options.smoke:
        options.models, options.points, options.rounds = ["opt"], ["1x8", "2x8"], 1
    elif unknown := [name for name in {*options.models} - {*_MODELS.split(",")} if not (Path(name) / "config.json").is_file()]:
        parser.error(f"--models: {unknown[0]} is not a folder with a config.json; name one, or choose from {_MODELS}")
    elif options.out is None:
        options.out = RESULTS
    return options


if __name__ == "__main__":
    sys.exit(main())
