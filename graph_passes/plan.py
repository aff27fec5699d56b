"""From a schedule to variants and segments: which layers are compiled together, and which segments each variant runs."""

from __future__ import annotations

from dataclasses import dataclass

from skipdecode.schedule import Schedule, active_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Segments partition the layers `0 .. L - 1`; a variant is a subset of the segments, run in order."""

    segments: tuple[tuple[int, ...], ...]  # consecutive layers each, lowest first
    variants: tuple[tuple[int, tuple[int, ...]], ...]  # (layer count, segment indices), most layers first


def plan_variants(schedule: Schedule, *, max_layers_per_segment: int | None = None, prompt_border: int | None = None) -> Plan:
    """Cut the layers wherever some variant's set of active layers begins or ends.

    Full depth is always a variant: prefill and the baseline use it. Segments are as long as possible, up to
    `max_layers_per_segment` (compiling holds a whole segment in memory). If `prompt_border` is given, a segment begins
    at that layer, from which on only a prompt's last token is computed.
    """
    depth = schedule.num_layers
    counts = sorted({depth, *schedule.variants}, reverse=True)
    active = {count: frozenset(active_layers(depth, schedule.warmup_layers, count)) for count in counts}
    segments: list[list[int]] = []
    for layer in range(depth):
        joined = segments and layer != prompt_border and len(segments[-1]) < (max_layers_per_segment or depth)
        if joined and all((layer in layers) == (layer - 1 in layers) for layers in active.values()):
            segments[-1].append(layer)
        else:
            segments.append([layer])
    return Plan(
        segments=tuple(map(tuple, segments)),
        variants=tuple((count, tuple(i for i, layers in enumerate(segments) if layers[0] in active[count])) for count in counts),
    )
