"""The bytes that a decode step must read. They bound its time, and a schedule's promised gain is a ratio of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from skipdecode.kv_buffer import state_bytes
from skipdecode.manifest import Manifest, Target
from skipdecode.schedule import active_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Counts the weights of active segments and head once, and per row its states and the keys and values of all valid positions.

    For layers that attend to a sliding window, this is more keys and values than they read.
    """

    manifest: Manifest
    target: Target

    def of(self, num_layers: int, batch: int, context: int) -> int:
        """Bytes that a step of the variant with `num_layers` layers reads, for `batch` rows of `context` valid positions each."""
        schedule, model = self.manifest.schedule, self.manifest.model
        active = active_layers(model.num_layers, schedule.warmup_layers, num_layers)
        bytes_per_row = sum(state_bytes(model.layer_group(layer), context, self.target.float_bytes) for layer in active)
        return self._weights(frozenset(active)) + bytes_per_row * batch

    def _weights(self, active: Collection[int]) -> int:
        segments = zip(self.manifest.segments, self.target.segment_weight_bytes, strict=True)
        return self.target.head_weight_bytes + sum(size for layers, size in segments if layers[0] in active)
