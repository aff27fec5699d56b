"""What a results file and its name say about the machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from skipdecode.cpu import cpu_features
from skipdecode.validation.machine import ReadBandwidth, machine_facts

__all__ = ["ReadBandwidth", "facts", "write_results"]

RESULTS = Path(__file__).parent / "results"


def facts() -> dict[str, Any]:
    """The machine's facts, with the version of every system that takes part."""
    libraries = ("skipdecode", "onnxruntime", "tensorrt_rtx", "tensorrt", "torch", "transformers", "ctranslate2", "numpy")
    return {**machine_facts(libraries), "cpu_features": cpu_features()}


def write_results(name: str, result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write `<name>-<machine>.json`, whole or not at all; returns the path. `result` has the machine's facts under "machine".

    A machine is named after its GPU if that is measured (nvidia-h200), else after its CPU: amd-epyc-2-cores, or
    amd-epyc-avx512-2-cores if it has AVX-512, for which other matrix kernels are chosen.
    """
    machine = result["machine"]
    wide = " avx512" if "avx512f" in machine.get("cpu_features", ()) else ""
    title = machine.get("gpu") or f"{machine['cpu']}{wide} {machine['cores']} cores"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return partial.replace(path)
