"""Time and peak memory of `skip-export`, over all its processes, on a known architecture with random weights.

    python benchmarks/export_cost.py opt-6.7b --schedule linear --dtype fp16 --target tensorrt-rtx:sm89

measures that command and writes results/export-<model>-<values of its options>-<machine>.json. The model may be a folder that
holds only a config.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from machine import facts, write_results

_IMPORTS = "import onnxruntime, torch, transformers.models.opt.modeling_opt, skipdecode.exporter.export"
_SAMPLE_S = 0.05


def measure_export(model: str, out: Path, options: Sequence[str] = ()) -> dict[str, Any]:
    """Export `model` to `out`, which is deleted. Memory in MiB; `imports_rss_mib` is what only importing the libraries takes."""
    _, imports, _ = _run([sys.executable, "-c", _IMPORTS])
    command = [sys.executable, "-m", "skipdecode.exporter.command", model]
    command += ["--random-weights", "--quiet", "--out", str(out), *options]
    seconds, peak, anonymous = _run(command)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    shutil.rmtree(out)
    return {
        "export_s": round(seconds, 1),
        "peak_rss_mib": round(peak),  # sampled; includes pages of mapped files, which the kernel may drop
        "peak_anonymous_mib": round(anonymous),
        "imports_rss_mib": round(imports),
        "bundle_mib": round(size / 2**20),
    }


def show_export(model: str, figures: dict[str, Any]) -> None:
    """Print one line."""
    memory = f"{figures['peak_rss_mib']} MiB resident, {figures['peak_anonymous_mib']} anonymous"
    print(f"skip-export {model}: {figures['export_s']} s, peak {memory}; the libraries alone {figures['imports_rss_mib']} MiB")


def _run(command: list[str]) -> tuple[float, float, float]:
    """Run a command: seconds, peak resident MiB and peak anonymous MiB of the process and its children together."""
    started, resident, anonymous = time.perf_counter(), 0.0, 0.0
    process = subprocess.Popen(command)
    while process.poll() is None:
        now = _tree_mib(process.pid)
        resident, anonymous = max(resident, now[0]), max(anonymous, now[1])
        time.sleep(_SAMPLE_S)
    if process.returncode:
        raise RuntimeError(f"{command[1:4]} exited {process.returncode}")
    return time.perf_counter() - started, resident, anonymous


def _tree_mib(pid: int) -> tuple[float, float]:
    resident = anonymous = 0
    try:
        root = psutil.Process(pid)
        for each in (root, *root.children(recursive=True)):
            memory = each.memory_info()
            resident, anonymous = resident + memory.rss, anonymous + memory.rss - memory.shared
    except psutil.NoSuchProcess:  # ended while being sampled
        pass
    return resident / 2**20, anonymous / 2**20


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name such as opt-6.7b, or a folder")
    arguments, options = parser.parse_known_args()  # options: those for skip-export
    model = arguments.model
    folder = os.environ.get("TMPDIR", tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="skipdecode-export-", dir=folder) as temporary:
        figures = measure_export(model, Path(temporary) / "bundle", options)
    show_export(model, figures)
    model = Path(model).name  # of a folder with a config.json
    name = "-".join(["export", model, *(value.replace(":", "-") for value in options if not value.startswith("-"))])
    print(write_results(name, {"machine": facts(), "model": model, "options": options, **figures}))


if __name__ == "__main__":
    _main()
