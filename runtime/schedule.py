"""The schedule: how many layers each position computes (SkipDecode, arXiv 2307.02628, section 3).

This is the one place that knows which layers are active at a position. Everything else (variants, segments, KV buffer,
training) asks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral

from skipdecode.errors import ScheduleError


class Anchor(StrEnum):
    """Where positions are counted from."""

    GENERATED = "generated"  # t = 0 at the first decode step; the prompt runs at full depth
    ABSOLUTE = "absolute"  # t = 0 at the first prompt token


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How many layers each position computes: `t -> k(t)`, never increasing, so that active layers are nested.

    Raises:
        ScheduleError: `layers` is empty, rises, holds anything but integers, or leaves `least_layers(...) .. num_layers`;
            `warmup_layers` is outside 0 .. `num_layers`; the anchor is unknown.
    """

    name: str  # how it was made, for display: full, linear, power, step or table
    num_layers: int  # L
    warmup_layers: int  # w: every position computes the first w layers; L: early exit, the first k(t) and none on top
    layers: tuple[int, ...]  # k(t) for t < span; later positions keep the last count
    anchor: Anchor = Anchor.GENERATED

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "anchor", Anchor(self.anchor))  # accepts the enum's string values, too
        except ValueError as error:
            raise ScheduleError(f"the anchor is {self.anchor!r}", f"choose {' or '.join(Anchor)}") from error
        if not 0 <= self.warmup_layers <= self.num_layers:
            raise ScheduleError(
                f"warmup_layers {self.warmup_layers}: the model has {self.num_layers} layers",
                f"choose --warmup-layers 0..{self.num_layers - 1}, or {self.num_layers} for early exit",
            )
        if not self.layers:
            raise ScheduleError("the table of layer counts is empty", "give one count per position")
        least = least_layers(self.num_layers, self.warmup_layers)
        for t, count in enumerate(self.layers):
            if not isinstance(count, Integral) or not least <= count <= self.num_layers:
                raise ScheduleError(
                    f"{count} layers at position {t}: the model has {self.num_layers} and {self.warmup_layers} warm-up layers",
                    f"choose counts from {least} to {self.num_layers}",
                    where=f"{self.name} schedule",
                )
            if t and count > self.layers[t - 1]:
                raise ScheduleError(
                    f"the layer count rises from {self.layers[t - 1]} to {count} at position {t}",
                    "a later position would need keys and values that were never computed: let it fall or stay the same",
                    where=f"{self.name} schedule",
                )

    @property
    def span(self) -> int:
        """How many positions have a count of their own; later positions keep the last count."""
        return len(self.layers)

    @property
    def mean_layers(self) -> float:
        """Mean layer count over the span (the paper's measure of speed)."""
        return sum(self.layers) / len(self.layers)

    def layers_at(self, position: int) -> int:
        """k(t): how many layers position `t >= 0` computes."""
        return self.layers[min(position, len(self.layers) - 1)]

    def active(self, position: int) -> tuple[int, ...]:
        """Active layers at `t`: the first `w` and the last `k(t) - w`, ascending (paper section 3.2)."""
        return active_layers(self.num_layers, self.warmup_layers, self.layers_at(position))

    def least_count(self, layer: int) -> int:
        """The least layer count that includes `layer`."""
        return layer + 1 if layer < self.warmup_layers else self.num_layers - layer + self.warmup_layers

    def cap(self, layer: int) -> int | None:
        """How many positions compute `layer`: it is active on exactly `[0, cap)`. None: on all positions."""
        needed = self.least_count(layer)
        if self.layers[-1] >= needed:
            return None
        return next(t for t, count in enumerate(self.layers) if count < needed)

    @property
    def variants(self) -> tuple[int, ...]:
        """The distinct layer counts, most layers first."""
        return tuple(sorted(set(self.layers), reverse=True))


def least_layers(num_layers: int, warmup_layers: int) -> int:
    """The fewest layers a position may compute: the warm-up layers and one on top; 1 for early exit, which has no top."""
    return 1 if warmup_layers == num_layers else warmup_layers + 1


def active_layers(num_layers: int, warmup_layers: int, count: int) -> tuple[int, ...]:
    """The first `warmup_layers` (at most `count`) of `num_layers` layers and as many of the last as make `count`, ascending."""
    first = min(warmup_layers, count)
    return (*range(first), *range(num_layers - (count - first), num_layers))


def full_depth(num_layers: int) -> Schedule:
    """Every layer at every position: the baseline."""
    return Schedule(name="full", num_layers=num_layers, warmup_layers=0, layers=(num_layers,))
