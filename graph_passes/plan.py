"""From a schedule to variants and segments: which layers are compiled together, and which segments each variant climbs."""

from __future__ import annotations

from dataclasses import dataclass

from skipdecode.schedule import Schedule, active_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Segments partition `0 .. L - 1`; a variant is a subset of them, climbed in order."""

    segments: tuple[tuple[int, ...], ...]  # consecutive layers each, lowest first
    variants: tuple[tuple[int, tuple[int, ...]], ...]  # (layer count, indices of its segments), most layers first


def plan_variants(schedule: Schedule, *, max_layers_per_segment: int | None = None, border: int | None = None) -> Plan:
    """Cut the layers wherever some variant's set of active layers begins or ends.

    Full depth is always a variant: prefill and the baseline use it. Segments are maximal, but no longer than
    `max_layers_per_segment` (compiling needs a whole segment in memory), and one begins at `border`, where there is one.
    """
    depth = schedule.num_layers
    counts = sorted({depth, *schedule.variants}, reverse=True)
    active = {count: frozenset(active_layers(depth, schedule.warmup_layers, count)) for count in counts}
    segments: list[list[int]] = []
    for layer in range(depth):
        joined = segments and layer != border and len(segments[-1]) < (max_layers_per_segment or depth)
        if joined and all((layer in layers) == (layer - 1 in layers) for layers in active.values()):
            segments[-1].append(layer)
        else:
            segments.append([layer])
    return Plan(
        segments=tuple(map(tuple, segments)),
        variants=tuple((count, tuple(i for i, layers in enumerate(segments) if layers[0] in active[count])) for count in counts),
    )
