"""The bytes that a decode step must read: what bounds its time, and what a schedule's promise is counted in."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from skipdecode.kv_buffer import state_bytes
from skipdecode.manifest import Manifest, Target
from skipdecode.schedule import active_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Weights of the active segments and the head once; keys and values of every valid position a row, and states.

    Where layers attend to a sliding window, that counts more of the keys and values than they read.
    """

    manifest: Manifest
    target: Target

    def of(self, num_layers: int, batch: int, context: int) -> int:
        """Bytes of one step of the variant with `num_layers` layers, `batch` rows and `context` valid positions each."""
        schedule, model = self.manifest.schedule, self.manifest.model
        active = active_layers(model.num_layers, schedule.warmup_layers, num_layers)
        kept = sum(state_bytes(model.kept(layer), context, self.target.float_bytes) for layer in active)
        return self._weights(frozenset(active)) + kept * batch

    def _weights(self, active: Collection[int]) -> int:
        segments = zip(self.manifest.segments, self.target.segment_weight_bytes, strict=True)
        return self.target.head_weight_bytes + sum(size for layers, size in segments if layers[0] in active)
