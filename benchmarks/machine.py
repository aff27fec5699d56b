"""The machine's part of a results file and of its name."""

from __future__ import annotations

import re
from typing import Any

from skipdecode.validation.machine import ReadBandwidth, machine_facts

__all__ = ["ReadBandwidth", "facts", "slug"]


def facts() -> dict[str, Any]:
    """The machine, with the versions of every system that takes part."""
    return machine_facts(("skipdecode", "onnxruntime", "torch", "transformers", "ctranslate2", "numpy"))


def slug(machine: dict[str, Any]) -> str:
    """A file name's part: amd-epyc-2-cores."""
    return re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['cores']} cores".lower()).strip("-")
