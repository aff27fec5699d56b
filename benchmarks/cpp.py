"""Is the C++ runtime as fast as the Python one, and how much time does each spend outside the engines?

One bundle (OPT 24 x 1024, random weights, fp32, 2x over 64 positions), batch 1, prompt 32, 64 decode steps; the two runtimes take
turns, each in its own process. Also measured: seconds to load, with a warm page cache.

    make cpp && .venv/bin/python benchmarks/cpp.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import facts, write_results
from models import make_bundle, make_checkpoint

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "build" / "cpp" / "release" / "cpp_bench" / "skd_bench"
PROMPT, STEPS = 32, 64
_PYTHON = """
import json, sys
import skipdecode
path, prompt, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = skipdecode.load(path)
times = {"full": [], "scheduled": []}
for _ in range(4):
    for name, schedule in (("full", "full"), ("scheduled", None)):
        result = model.generate([[5] * prompt], max_new_tokens=steps + 1, schedule=schedule, ignore_eos=True)
        times[name].append(result.timings.decode_s / steps * 1e3)
medians = {name: {"token_ms": sorted(values[1:])[1]} for name, values in times.items()}  # the first is a warm-up
print(json.dumps({"load_s": model.load_s, **medians}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one round, nothing written")
    options = parser.parse_args()
    rounds = 1 if options.smoke else options.rounds
    runs: dict[str, list[dict[str, Any]]] = {"python": [], "cpp": []}
    with tempfile.TemporaryDirectory(prefix="skipdecode-bench-") as folder:
        make_checkpoint("opt", Path(folder) / "checkpoint", options.smoke)
        bundle = Path(folder) / "bundle"
        make_bundle(Path(folder) / "checkpoint", bundle, 2.0, STEPS)
        weights = (Path(folder) / "checkpoint" / "model.safetensors").stat().st_size
        for _ in range(rounds):
            runs["python"].append(_run([sys.executable, "-c", _PYTHON, str(bundle), str(PROMPT), str(STEPS)]))
            runs["cpp"].append(_run([str(BENCH), str(bundle), str(PROMPT), str(STEPS + 1), "3"]))
    result = {"machine": facts(), "rounds": rounds, "weights_gb": weights / 1e9, **{name: _row(name, runs) for name in runs}}
    print(json.dumps(result, indent=2))
    if not options.smoke:
        write_results("cpp", result)


def _run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _row(name: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the rounds; `vs_python`: the median of the rounds' ratios, Python's time over this one's."""
    row: dict[str, Any] = {"load_s": statistics.median(run["load_s"] for run in runs[name])}
    for schedule in ("full", "scheduled"):
        keys = runs[name][0][schedule]
        row[schedule] = {key: statistics.median(run[schedule][key] for run in runs[name]) for key in keys}
        ratios = [
            ours[schedule]["token_ms"] / theirs[schedule]["token_ms"]
            for ours, theirs in zip(runs["python"], runs[name], strict=True)
        ]
        row[schedule]["vs_python"] = statistics.median(ratios)
    return row


if __name__ == "__main__":
    main()
