"""The small bundles that the conformance cases run on, rebuilt on each machine from the same seeds."""

from __future__ import annotations

from pathlib import Path

from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import ScheduleRequest
from tests.models import LAYERS, MAX_LENGTH
from tests.zoo import Zoo

_LINE = {"max_layers": LAYERS, "min_layers": 2, "span": 10}
BUNDLES: dict[str, tuple[str, ScheduleRequest, str]] = {  # name -> architecture, schedule, quantisation
    "opt": ("opt", ScheduleRequest(name="linear", **_LINE), "none"),
    "llama": ("llama", ScheduleRequest(name="linear", **_LINE), "none"),
    "gemma3": ("gemma3", ScheduleRequest(name="linear", **_LINE), "none"),
    "llama-absolute": ("llama", ScheduleRequest(name="linear", anchor=Anchor.ABSOLUTE, **_LINE), "none"),
    "opt-early-exit": ("opt", ScheduleRequest(name="linear", warmup_layers=LAYERS, **_LINE), "none"),
    "gpt2-few-variants": ("gpt2", ScheduleRequest(name="linear", max_variants=2, **_LINE), "none"),
    "mixtral": ("mixtral", ScheduleRequest(name="linear", **_LINE), "none"),
    "qwen3-int8": ("qwen3", ScheduleRequest(name="power", speedup=2, span=10), "int8"),
}


def make(name: str, zoo: Zoo, out: Path) -> Path:
    """Export a bundle of the table."""
    architecture, schedule, quantize = BUNDLES[name]
    export(
        ExportRequest(
            model=str(zoo.checkpoint(architecture)), out=out, schedule=schedule, quantize=quantize,
            max_batch=4, max_length=MAX_LENGTH,
        )
    )  # fmt: skip
    return out
