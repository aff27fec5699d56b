"""How fast is a decode step, against peers and against the machine's read bandwidth?

All systems take turns in one run, with the same number of threads. This runtime, at full depth and with linear schedules, in
fp32, int8 and int4, is compared with transformers (eager, and its step through torch.compile), CTranslate2 (fp32, int8) and, for
the Llama-like model, ONNX Runtime GenAI (fp32, int4) and llama.cpp (fp32, Q8_0, Q4_0). Only when asked for: a mixture of experts
(mixtral) against transformers and llama.cpp, and layers that keep states (lfm2, and granitemoehybrid with Mamba-2) or read the
keys of others (gemma4_text) against transformers. Each system lives in its own process and takes one turn per round. A point is
rows x prompt tokens. Also reported: time of prefill, resident memory, time outside engines, and wall-clock gain against what the
bytes promise. Peers that are not installed are left out and named.

examples:
  decode.py                                   (the default models and points: an hour on 2 cores, 20 GiB of disk and memory)
  decode.py --models opt --points 1x32 --repeats 9
  decode.py --kinds int4 --points 4x32,16x32 --speedups 2
  decode.py --smoke                           (tiny models: does it run at all; its figures mean nothing)
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

from machine import ReadBandwidth, facts, write_results
from models import SHAPES, make_checkpoint
from summary import Point, show_model, show_point, summarize, weight_sharing
from systems import System, make_systems, missing_peers
from worker import in_process

_MODELS, _KINDS, _POINTS = ("opt", "llama", "e2e"), ("fp32", "int8", "int4"), "1x32,4x32,16x32,1x512,1x2000"
# tokens per row; longer points are left out
_MAX_LENGTH = {**dict.fromkeys(SHAPES, 2048), "e2e": 256}
_PAUSE_S = 0.5  # between turns: some thread pools spin for 0.2 s after their work


def main() -> int:
    """Measure, print tables and one JSON line, and write results/."""
    options = _options()
    settings = {
        "points": [str(point) for point in options.points], "kinds": options.kinds, "speedups": options.speedups,
        "threads": options.threads, "new_tokens": options.tokens, "missing_peers": missing_peers(),
        "anew": options.anew, "block": options.block, "smoke": options.smoke,
    }  # fmt: skip
    result: dict[str, Any] = {"machine": facts(), "settings": settings, "models": {}}
    if missing_peers():
        print(f"not installed, left out: {', '.join(missing_peers())} (pip install -e '.[bench]')", file=sys.stderr)
    try:
        for name in options.models:
            with tempfile.TemporaryDirectory(prefix="skipdecode-bench-") as folder:
                result["models"][name] = _measure_model(name, Path(folder), options)
    finally:  # a model's points are kept together or not at all; a failure must not lose an hour of other models'
        if result["models"] and not options.smoke:
            _write(result, options)
    print(json.dumps(result))
    return 0


def _measure_model(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all points and systems on one model, whose files lie in `folder`."""
    _progress(f"{name}: exporting and converting")
    in_process(make_checkpoint, name, folder / "checkpoint", options.smoke, shared=options.smoke)
    systems = make_systems(
        name, folder / "checkpoint", options.kinds, options.speedups, options.tokens - 1, options.threads, options.block,
        options.smoke,
    )  # fmt: skip
    points = _points_of(name, options)
    figures: dict[str, Any] = {"points": []}
    for point in points:
        prompts = _prompts(point)
        bandwidth = _measure_rounds(name, systems, prompts, options)
        figures["points"].append(summarize(systems, bandwidth, point))
        show_point(name, figures["points"][-1])
        if point is points[0]:
            figures |= _measure_once(systems, prompts, options.tokens)
            show_model(name, figures)
            for system in systems:
                if system.first_point_only:
                    system.close()
            systems = [system for system in systems if not system.first_point_only]
    for system in systems:
        system.close()
    return figures


def _points_of(name: str, options: argparse.Namespace) -> list[Point]:
    """The points whose prompt and new tokens fit into the model's length."""
    return [point for point in options.points if point.context + options.tokens <= _MAX_LENGTH[name]]


def _measure_once(systems: list[System], prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """What is measured once per model, after its first point."""
    memory = {system.name: system.memory_mib() for system in systems}
    ours = [system for system in systems if system.reads]
    targets = {each.kind: each.reads.target for each in ours if each.reads}
    return {
        "resident_mib": memory,
        "weight_sharing": weight_sharing(systems, memory),
        "outside_engines_us_per_step": {each.name: each.call("outside_engines_us", prompts, tokens) for each in ours},
        "layers_mb": {kind: round(sum(target.segment_weight_bytes) / 1e6, 2) for kind, target in targets.items()},
        "head_mb": {kind: round(target.head_weight_bytes / 1e6, 2) for kind, target in targets.items()},
    }


def _measure_rounds(name: str, systems: list[System], prompts: list[list[int]], options: argparse.Namespace) -> list[float]:
    """Fill each system's runs, one per round; returns each round's read bandwidth, GB/s.

    The first round is not counted, nor, with --anew, the first call of each process. There are as many rounds as fit into
    --seconds, at least 2 and at most --repeats.
    """
    bandwidth, gb_per_s, started = ReadBandwidth(options.threads, 16 if options.smoke else 512), [], time.monotonic()
    for system in systems:
        system.runs.clear()
    for repeat in range(-1, options.repeats):
        if repeat >= 2 and time.monotonic() - started > options.seconds * (repeat + 1) / (repeat + 2):
            break
        _progress(f"{name} {len(prompts)}x{len(prompts[0])}: " + ("warming up" if repeat < 0 else f"round {repeat + 1}"))
        gb_per_s.append(bandwidth.gb_per_s())
        first = max(0, repeat) % len(systems)
        for system in (*systems[first:], *systems[:first]):
            if options.anew and repeat >= 0:
                system.close()
                system.call("generate", prompts, options.tokens)
            time.sleep(0 if options.smoke else _PAUSE_S)
            run = system.call("generate", prompts, options.tokens)
            if repeat >= 0:
                system.runs.append(run)
    return gb_per_s[1:]


def _prompts(point: Point) -> list[list[int]]:
    rng = random.Random(0)
    return [rng.choices(range(4, 500), k=point.context) for _ in range(point.batch)]


def _write(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the results and their plot. The file's name includes what differs from the default run."""
    from plot import plot

    varied = [
        *([] if list(result["models"]) == list(_MODELS) else result["models"]),
        *([] if options.kinds == list(_KINDS) else options.kinds),
        *([] if options.block == 32 else [f"block-{options.block}"]),
        *([] if ",".join(map(str, options.points)) == _POINTS else map(str, options.points)),
    ]
    path = write_results("-".join(["decode", *varied]), result)
    machine, threads = result["machine"], result["settings"]["threads"]
    title = f"A decode step, {threads} threads, {machine['cpu']} ({machine['cores']} cores), interleaved rounds"
    plot(result, path.with_suffix(".png"), title)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Decode speed against peers.", epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(_MODELS), help="comma-separated (%(default)s)")
    parser.add_argument("--kinds", default=",".join(_KINDS), help="kinds of weights (%(default)s)")
    parser.add_argument("--block", type=int, default=32, help="block size of quantised weights (%(default)s)")
    parser.add_argument("--points", default=_POINTS, help="rows x prompt tokens (%(default)s)")
    parser.add_argument(
        "--speedups",
        default="2,3,4,5",
        help="of linear schedules; all but the first only in the first kind and at the first point (%(default)s)",
    )
    parser.add_argument("--tokens", type=int, default=48, help="new tokens, the schedule's span + 1 (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="most rounds per point (%(default)s)")
    parser.add_argument("--seconds", type=float, default=150, help="time per point, but at least 2 rounds (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each system (%(default)s)")
    parser.add_argument("--anew", action="store_true", help="restart each process in each round: launches differ by a tenth")
    parser.add_argument("--smoke", action="store_true", help="tiny models, few tokens, nothing written")
    options = parser.parse_args()
    options.models, options.kinds = options.models.split(","), options.kinds.split(",")
    unknown = {*options.models} - {*_MAX_LENGTH} | {*options.kinds} - {*_KINDS}
    if unknown or options.tokens < 3 or options.repeats < 2:
        parser.error(f"unknown: {', '.join(sorted(unknown))}" if unknown else "--tokens needs 3 or more, --repeats 2 or more")
    options.points = [Point(*map(int, point.split("x"))) for point in options.points.split(",")]
    options.speedups = [float(value) for value in options.speedups.split(",")]
    if options.smoke:
        options.tokens, options.repeats, options.speedups = 6, 2, [2.0]
        options.points, options.models, options.kinds = [Point(1, 8), Point(2, 8)], ["llama"], ["fp32"]
    if pointless := [name for name in options.models if not _points_of(name, options)]:
        parser.error(
            f"--points: none has room for {options.tokens} new tokens in the {_MAX_LENGTH[pointless[0]]} of {pointless[0]}; "
            "choose shorter prompts, or leave the model out"
        )
    return options


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
