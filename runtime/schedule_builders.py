"""From what a user asks for (`linear`, 2x) to a `Schedule`: the one place that chooses min, max and alpha."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from skipdecode.errors import ScheduleError
from skipdecode.schedule import Anchor, Schedule, full_depth, least_layers

SCHEDULES = ("linear", "full", "power", "step", "table:FILE")
DEFAULT_SPEEDUP = 2.0
_STEP_STAIRS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """What the command line says about the schedule; None where it is silent."""

    name: str = "linear"  # one of SCHEDULES
    speedup: float | None = None  # L / mean layers over the span
    max_layers: int | None = None
    min_layers: int | None = None
    warmup_layers: int = 1  # 0 .. L; L: early exit
    span: int = 128  # positions until min_layers is reached
    alpha: float | None = None  # decay per position, `power` only; 0 < alpha <= 1
    max_variants: int | None = None  # at most this many distinct counts, rounded up
    anchor: Anchor = Anchor.GENERATED


def build_schedule(request: ScheduleRequest, num_layers: int) -> Schedule:
    """The schedule that `request` asks for on a model with `num_layers` layers.

    Linear is the paper's (section 3.1): `k(t) = round(max - (max - min) t / (span - 1))`; power is arXiv 2503.08524's.

    Raises:
        ScheduleError: an unknown name, a range that is empty, or a speedup that cannot be reached.
    """
    kind, _, table = request.name.partition(":")
    if kind == "table" and table:
        return _limit_variants(_from_table(Path(table), request, num_layers), request.max_variants)
    if request.name not in ("linear", "full", "power", "step"):
        raise ScheduleError(f"unknown schedule {request.name!r}", f"choose one of {', '.join(SCHEDULES)}")
    _check_request(request, num_layers)
    if kind == "full":
        return full_depth(num_layers)
    lower, upper = _ends(request, num_layers)
    counts = {"linear": _linear, "step": _step, "power": _power}[kind](request, lower, upper, num_layers)
    schedule = Schedule(
        name=kind, num_layers=num_layers, warmup_layers=request.warmup_layers, layers=tuple(counts), anchor=request.anchor
    )
    return _limit_variants(schedule, request.max_variants)


def _check_request(request: ScheduleRequest, num_layers: int) -> None:
    if not 0 <= request.warmup_layers <= num_layers:
        raise ScheduleError(
            f"--warmup-layers {request.warmup_layers}: the model has {num_layers} layers",
            f"choose 0..{num_layers - 1}, or {num_layers} for early exit",
        )
    least = least_layers(num_layers, request.warmup_layers)
    for option, value in (("--max-layers", request.max_layers), ("--min-layers", request.min_layers)):
        if value is not None and not least <= value <= num_layers:
            raise ScheduleError(
                f"{option} {value}: the model has {num_layers} layers and {request.warmup_layers} warm-up layers",
                f"choose {least}..{num_layers}",
            )
    for option, number in (("--span", request.span), ("--max-variants", request.max_variants)):
        if number is not None and number < 1:
            raise ScheduleError(f"{option} {number} is not a positive count", f"choose {option} 1 or more")
    if request.alpha is not None and (request.name != "power" or not 0 < request.alpha <= 1):
        raise ScheduleError(f"--alpha {request.alpha}", "give a decay in (0, 1], and only with --schedule power")


def _ends(request: ScheduleRequest, num_layers: int) -> tuple[int, int]:
    """(min, max): what was given, else a 1:3 range around the mean that the speedup asks for."""
    least, lower, upper = least_layers(num_layers, request.warmup_layers), request.min_layers, request.max_layers
    speedup = request.speedup
    if speedup is None and lower is None and upper is None:
        speedup = DEFAULT_SPEEDUP
    if speedup is None:
        upper = num_layers if upper is None else upper
        lower = min(upper, max(least, round(num_layers / 4))) if lower is None else lower
    else:
        mean = _mean_for(speedup, request, num_layers)
        if request.name == "power":
            upper = num_layers if upper is None else upper
            lower = max(least, round(mean / 2)) if lower is None else lower
        elif lower is None:
            lower = round(max(mean / 2, 2 * mean - num_layers)) if upper is None else round(2 * mean - upper)
            lower = lower if upper is not None else max(least, lower)
        if upper is None:
            upper = min(num_layers, round(2 * mean - lower)) if request.min_layers is None else round(2 * mean - lower)
        _check_reached(lower, upper, least, speedup, num_layers)
    if lower > upper:
        raise ScheduleError(
            f"min_layers {lower} is above max_layers {upper}",
            "lower --min-layers or raise --max-layers",
            where=f"{request.name} schedule",
        )
    return lower, upper


def _mean_for(speedup: float, request: ScheduleRequest, num_layers: int) -> float:
    least = least_layers(num_layers, request.warmup_layers)
    if not 1.0 <= speedup <= num_layers / least:
        nearest = 1.0 if not speedup >= 1.0 else num_layers / least
        raise ScheduleError(
            f"--speedup {speedup:g} cannot be reached by {num_layers} layers of which at least {least} are computed",
            f"the nearest that can is --speedup {_floor(nearest):g}",
        )
    return num_layers / speedup


def _check_reached(lower: int, upper: int, least: int, speedup: float, num_layers: int) -> None:
    """Whether the ends that follow from the speedup and what was given lie inside the model."""
    if least <= lower <= upper <= num_layers:
        return
    low = max(least, min(lower, num_layers))
    high = max(low, min(upper, num_layers))
    raise ScheduleError(
        f"--speedup {speedup:g} with the given ends needs {upper} -> {lower} layers, out of {num_layers} -> {least}",
        f"the nearest that can is --speedup {_floor(2 * num_layers / (low + high)):g}",
    )


def _floor(value: float) -> float:
    return int(value * 100) / 100


def _linear(request: ScheduleRequest, lower: int, upper: int, num_layers: int) -> list[int]:
    return [round(upper - (upper - lower) * t / max(1, request.span - 1)) for t in range(request.span)]


def _step(request: ScheduleRequest, lower: int, upper: int, num_layers: int) -> list[int]:
    stairs = max(1, min(request.max_variants or _STEP_STAIRS, request.span))
    levels = [round(upper - (upper - lower) * i / max(1, stairs - 1)) for i in range(stairs)]
    return [levels[t * stairs // request.span] for t in range(request.span)]


def _power(request: ScheduleRequest, lower: int, upper: int, num_layers: int) -> list[int]:
    def counts(alpha: float) -> list[int]:
        return [max(lower, int(upper * alpha**t + 1e-9)) for t in range(request.span)]

    if request.alpha is not None:
        return counts(request.alpha)
    if request.speedup is None and (request.max_layers is not None or request.min_layers is not None):
        return counts((lower / upper) ** (1 / max(1, request.span - 1)))
    target = num_layers / (request.speedup or DEFAULT_SPEEDUP)
    found = counts(_bisect(lambda alpha: sum(counts(alpha)) / request.span - target))
    if abs(sum(found) / request.span - target) > 1:
        raise ScheduleError(
            f"--speedup {request.speedup or DEFAULT_SPEEDUP:g} cannot be reached from {upper} to {lower} layers",
            f"the nearest that can is --speedup {_floor(num_layers * request.span / sum(found)):g}",
            where="power schedule",
        )
    return found


def _bisect(excess: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return high if excess(high) <= 0 else low


def _from_table(path: Path, request: ScheduleRequest, num_layers: int) -> Schedule:
    where = f"table {path}"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScheduleError(f"cannot be read ({error.strerror})", "name a JSON file", where=where) from error
    except ValueError as error:
        raise ScheduleError(f"is not JSON ({error})", "write a list of layer counts", where=where) from error
    warmup = request.warmup_layers
    if isinstance(data, dict):
        unknown = sorted(set(data) - {"layers", "warmup_layers"})
        if unknown or "layers" not in data:
            raise ScheduleError(f"has keys {sorted(data)}", 'give "layers" and, if wanted, "warmup_layers"', where=where)
        warmup, data = data.get("warmup_layers", warmup), data["layers"]
    if not isinstance(data, list) or any(type(count) is not int for count in [*data, warmup]):
        raise ScheduleError("is not a list of whole numbers", "write for example [24, 24, 18, 12]", where=where)
    return Schedule(name="table", num_layers=num_layers, warmup_layers=warmup, layers=tuple(data), anchor=request.anchor)


def _limit_variants(schedule: Schedule, max_variants: int | None) -> Schedule:
    """Round `k(t)` up to at most `max_variants` levels, each standing for an equal share of the distinct counts."""
    if max_variants is None or len(schedule.variants) <= max_variants:
        return schedule
    if max_variants < 1:
        raise ScheduleError(f"--max-variants {max_variants} is not a positive count", "choose 1 or more")
    counts, rounded = schedule.variants, {}
    for i, count in enumerate(counts):
        group = i * max_variants // len(counts)
        rounded[count] = counts[-(-group * len(counts) // max_variants)]
    return Schedule(
        name=schedule.name,
        num_layers=schedule.num_layers,
        warmup_layers=schedule.warmup_layers,
        layers=tuple(rounded[count] for count in schedule.layers),
        anchor=schedule.anchor,
    )
