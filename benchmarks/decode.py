"""How fast is a decode step, against peers and against the machine's read bandwidth?

One interleaved run, same threads, fp32, batch 1 unless told otherwise: this runtime at full depth and at speedups 2 to 5 (linear
schedule), transformers' `generate`, CTranslate2 (fp32, and int8 for scale). Each system lives in its own process; in each round
each takes its turn once. Also told: resident memory, time outside engines, wall-clock gain against what the layer count promises.

examples:
  decode.py                                   (both models; minutes on 2 cores, 20 GiB of temporary disk)
  decode.py --models opt --repeats 9
  decode.py --batch 16 --speedups 2 --repeats 3
  decode.py --quantize int4 --speedups 2
  decode.py --smoke                           (tiny models: does it run at all; its figures mean nothing)
  decode.py --models none --export-opt-1.3b   (time and peak memory of an export)
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from export_cost import measure_export, show_export
from machine import ReadBandwidth, facts, write_results
from models import make_files
from peers import CTranslate2, SkipDecode, Transformers
from summary import Load, System, show_model, summarize
from worker import Worker, in_process

_USUAL = {"batch": 1, "prompt": 32, "quantize": "none"}  # what varies is part of a results file's name
_PAUSE_S = 0.5  # between turns: some thread pools spin for 0.2 s after their work


def main() -> int:
    """Measure, print tables and one JSON line, write results/."""
    options = _options()
    machine = facts()
    result: dict[str, Any] = {"machine": machine, "settings": _settings(options), "models": {}}
    with tempfile.TemporaryDirectory(prefix="skipdecode-bench-") as temporary:
        if options.export_opt_1_3b:
            result["export_opt_1_3b"] = measure_export("opt-1.3b", Path(temporary) / "opt-1.3b")
            show_export("opt-1.3b", result["export_opt_1_3b"])
        for name in options.models:
            with tempfile.TemporaryDirectory(dir=temporary, prefix=name) as folder:
                result["models"][name] = measure_model(name, Path(folder), options)
            show_model(name, result["models"][name])
    if not options.smoke:
        _write(result)
    print(json.dumps(result))
    return 0


def measure_model(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All systems on one model; its files lie in `folder`."""
    speedups = [None, *options.speedups]
    _progress(f"{name}: exporting and converting")
    shape, variants = in_process(make_files, name, folder, speedups, options.tokens - 1, options.quantize, options.smoke)
    systems = [
        System(
            name=f"skipdecode {_label(speedup)}",
            worker=Worker(SkipDecode, folder / f"bundle-{i}", options.threads),
            variants=count,
        )
        for i, (speedup, count) in enumerate(zip(speedups, variants, strict=True))
    ]
    systems.append(System(name="transformers", worker=Worker(Transformers, folder / "checkpoint", options.threads)))
    for short, kind in (("fp32", "float32"), ("int8", "int8")):
        worker = Worker(CTranslate2, folder / f"ctranslate2-{kind}", options.threads, kind)
        systems.append(System(name=f"ctranslate2 {short}", worker=worker))
    rng = random.Random(0)
    prompts = [rng.choices(range(4, 500), k=options.prompt) for _ in range(options.batch)]
    bandwidth = _measure_rounds(systems, prompts, options)
    memory = {system.name: system.worker.memory_mib() for system in systems}
    ours = [system for system in systems if system.variants]
    outside = {system.name: system.worker.call("outside_engines_us", prompts, options.tokens) for system in ours}
    for system in systems:
        system.worker.close()
    return summarize(systems, shape, bandwidth, memory, outside, Load(options.batch, options.prompt, options.quantize))


def _label(speedup: float | None) -> str:
    return "full depth" if speedup is None else f"{speedup:g}x"


def _measure_rounds(systems: list[System], prompts: list[list[int]], options: argparse.Namespace) -> list[float]:
    """Fill each system's runs, one a round, after one round that is not counted; returns each round's read bandwidth, GB/s."""
    memory, found = ReadBandwidth(options.threads, 16 if options.smoke else 512), []
    for repeat in range(-1, options.repeats):
        _progress("warming up" if repeat < 0 else f"round {repeat + 1} of {options.repeats}")
        found.append(memory.gb_per_s())
        for system in systems:
            time.sleep(0 if options.smoke else _PAUSE_S)
            run = system.worker.call("generate", prompts, options.tokens)
            if repeat >= 0:
                system.runs.append(run)
    return found[1:]


def _write(result: dict[str, Any]) -> None:
    from plot import plot

    settings = result["settings"]
    varied = [f"{name}-{settings[name]}" for name, usual in _USUAL.items() if settings[name] != usual]
    path = write_results("-".join(["decode", *varied]) if result["models"] else "export", result)
    if result["models"]:
        plot(result, path.with_suffix(".png"))


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "batch": options.batch, "quantize": options.quantize, "threads": options.threads, "prompt": options.prompt,
        "new_tokens": options.tokens,
        "rounds": options.repeats, "smoke": options.smoke,
    }  # fmt: skip


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Decode speed against peers.", epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="opt,llama", help="opt, llama, both with a comma, or none (opt,llama)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens, the schedule's span + 1 (64)")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens (32)")
    parser.add_argument("--batch", type=int, default=1, help="rows (1)")
    parser.add_argument("--quantize", choices=["none", "int8", "int4"], default="none", help="this runtime's weights (none)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each system (2)")
    parser.add_argument("--speedups", default="2,3,4,5", help="speedups of the linear schedule (2,3,4,5)")
    parser.add_argument("--export-opt-1.3b", dest="export_opt_1_3b", action="store_true", help="also an export, random weights")
    parser.add_argument("--smoke", action="store_true", help="tiny models, few tokens, nothing written")
    options = parser.parse_args()
    options.models = [] if options.models == "none" else options.models.split(",")
    unknown = set(options.models) - {"opt", "llama"}
    if unknown or options.tokens < 3 or options.repeats < 1:
        parser.error(f"unknown models {sorted(unknown)}" if unknown else "--tokens needs 3 or more, --repeats 1 or more")
    options.speedups = [float(value) for value in options.speedups.split(",")]
    if options.smoke:
        options.tokens, options.repeats, options.speedups = 12, 1, [2.0]
    return options


def _progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
