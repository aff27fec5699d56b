"""Time and peak memory of `skip-export` on a known architecture with random weights, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_IMPORTS = "import onnxruntime, torch, transformers.models.opt.modeling_opt, skipdecode.exporter.export"
_SAMPLE_S = 0.05


def measure_export(model: str, out: Path) -> dict[str, Any]:
    """Export `model` to `out`, which is deleted; memory in MiB, of which the libraries alone are `imports_rss_mib`."""
    _, imports, _ = _run([sys.executable, "-c", _IMPORTS])
    command = [sys.executable, "-m", "skipdecode.exporter.cli", model, "--random-weights", "--quiet", "--out", str(out)]
    seconds, peak, anonymous = _run(command)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    shutil.rmtree(out)
    return {
        "export_s": round(seconds, 1),
        "peak_rss_mib": round(peak),  # with pages of mapped files, which the kernel may drop
        "peak_anonymous_mib": round(anonymous),  # sampled
        "imports_rss_mib": round(imports),
        "bundle_mib": round(size / 2**20),
    }


def show_export(model: str, figures: dict[str, Any]) -> None:
    """Print one line."""
    memory = f"{figures['peak_rss_mib']} MiB resident, {figures['peak_anonymous_mib']} anonymous"
    print(f"skip-export {model}: {figures['export_s']} s, peak {memory}; the libraries alone {figures['imports_rss_mib']} MiB")


def _run(command: list[str]) -> tuple[float, float, float]:
    """Seconds, peak resident MiB (this child's own rusage), peak anonymous MiB (sampled)."""
    started, anonymous = time.perf_counter(), 0.0
    process = subprocess.Popen(command)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        anonymous = max(anonymous, _anonymous_mib(process.pid))
        time.sleep(_SAMPLE_S)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command[1:4]} exited {process.returncode}")
    return time.perf_counter() - started, usage.ru_maxrss / 1024, anonymous


def _anonymous_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), 0.0)
