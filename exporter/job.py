"""What an export derives from its request before it writes anything."""

from __future__ import annotations

from dataclasses import dataclass

from skipdecode import manifest
from skipdecode.exporter.checkpoint_folder import Checkpoint
from skipdecode.exporter.request import ExportRequest
from skipdecode.exporter.skeleton import Skeleton
from skipdecode.graph_passes.plan import Plan
from skipdecode.graph_passes.quantization import Quantization
from skipdecode.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request, and everything that follows from it and from the model."""

    request: ExportRequest
    checkpoint: Checkpoint | None  # None: there are no weights, only the model's configuration
    skeleton: Skeleton
    limits: manifest.Limits
    schedule: Schedule
    plan: Plan
    quantization: Quantization | None  # None: weights are not quantised
