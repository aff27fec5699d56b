"""What the tests of TensorRT's targets ask an export for."""

from __future__ import annotations

import shutil
from pathlib import Path

from skipdecode.exporter.export import ExportRequest
from skipdecode.schedule_builders import ScheduleRequest
from tests.models import MAX_LENGTH
from tests.zoo import Zoo, edit_config

SCHEDULE = ScheduleRequest(name="step", max_layers=6, min_layers=3, span=4, max_variants=2)


def plan_request(zoo: Zoo, name: str, out: Path, **changes: object) -> ExportRequest:
    given = {"model": str(zoo.checkpoint(name)), "schedule": SCHEDULE, "max_batch": 4, "max_length": MAX_LENGTH}
    return ExportRequest(out=out, **{**given, "targets": ("tensorrt-rtx:sm89",), **changes})  # type: ignore[arg-type]


def longer_checkpoint(zoo: Zoo, name: str, folder: Path) -> Path:
    """A copy of a zoo checkpoint with positions for long runs."""
    checkpoint = shutil.copytree(zoo.checkpoint(name), folder / "longer")
    edit_config(checkpoint, max_position_embeddings=2**21)
    return checkpoint
