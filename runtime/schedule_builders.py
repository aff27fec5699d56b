"""From what a user asks for (`linear`, 2x) to a `Schedule`: the one place that chooses min, max and alpha."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from skipdecode.errors import ScheduleError
from skipdecode.schedule import Anchor, Schedule, full_depth, least_layers

_SPEEDUP_SCHEDULES = ("linear", "power", "step")
SCHEDULES = ("linear", "full", "power", "step", "table:FILE")
DEFAULT_SPEEDUP = 2.0
DEFAULT_SPAN = 128
_MAX_SPAN = 2**20  # longest span, beyond any model's length
_DEFAULT_STAIRS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """What is asked of a schedule, one field per command-line option; None leaves the choice to `build_schedule`."""

    name: str = "linear"  # one of SCHEDULES
    speedup: float | None = None  # L / mean layers over the span
    max_layers: int | None = None  # most layers, at the first position
    min_layers: int | None = None  # fewest layers, from the end of the span on
    warmup_layers: int = 1  # 0 .. L; L: early exit
    span: int | None = None  # positions until min_layers is reached; None: DEFAULT_SPAN
    alpha: float | None = None  # decay per position, `power` only; 0 < alpha <= 1
    max_variants: int | None = None  # at most this many distinct layer counts; others are rounded up to them
    anchor: Anchor = Anchor.GENERATED


def build_schedule(request: ScheduleRequest, num_layers: int) -> Schedule:
    """Build the schedule that `request` asks for, for a model with `num_layers` layers.

    Linear is the paper's (section 3.1): `k(t) = round(max - (max - min) t / (span - 1))`; power is arXiv 2503.08524's.

    Raises:
        ScheduleError: an unknown name, a number out of its range, a table that cannot be read or is malformed, or a speedup
            that cannot be reached.
    """
    check_schedule_request(request)
    _check_depth(request, num_layers)
    kind, _, table = request.name.partition(":")
    if kind in ("table", "full"):
        schedule = full_depth(num_layers) if kind == "full" else _from_table(Path(table), request, num_layers)
        return _limit_variants(schedule, request.max_variants)
    span = request.span or DEFAULT_SPAN
    lower, upper = _layer_range(request, span, num_layers)
    if kind == "linear":
        counts = _linear(span, lower, upper)
    elif kind == "step":
        counts = _step(request, span, lower, upper)
    else:
        counts = _power(request, span, lower, upper, num_layers)
    schedule = Schedule(
        name=kind, num_layers=num_layers, warmup_layers=request.warmup_layers, layers=tuple(counts), anchor=request.anchor
    )
    return _limit_variants(schedule, request.max_variants)


def check_schedule_request(request: ScheduleRequest) -> None:
    """Refuse a request that is wrong for a model of any depth.

    Raises:
        ScheduleError: an unknown name, a missing table file, `min_layers` above `max_layers`, or a number out of its range.
    """
    kind, _, table = request.name.partition(":")
    if not (kind == "table" and table) and request.name not in ("full", *_SPEEDUP_SCHEDULES):
        raise ScheduleError(f"unknown schedule {request.name!r}", f"choose one of {', '.join(SCHEDULES)}")
    if table and not os.path.exists(table):  # only looked up: a pipe can be read just once
        raise ScheduleError("cannot be read (no such file)", "name a JSON file", where=f"table {table}")
    lower, upper = request.min_layers, request.max_layers
    if lower is not None and upper is not None and lower > upper:
        raise ScheduleError(f"--min-layers {lower} is above --max-layers {upper}", "lower --min-layers or raise --max-layers")
    for option, number in (("--span", request.span), ("--max-variants", request.max_variants)):
        if number is not None and number < 1:
            raise ScheduleError(f"{option} {number} is not a positive count", f"choose {option} 1 or more")
    if request.span is not None and request.span > _MAX_SPAN:
        raise ScheduleError(f"--span {request.span} is longer than any row", f"choose --span {_MAX_SPAN} or less")
    if request.alpha is not None and (request.name != "power" or not 0 < request.alpha <= 1):
        raise ScheduleError(f"--alpha {request.alpha}", "give a decay in (0, 1], and only with --schedule power")


def unmet_requests(request: ScheduleRequest, schedule: Schedule) -> Iterator[str]:
    """Yield a message for each thing that was requested but is different in `schedule`.

    A table, full depth and --alpha fix every layer count, --max-variants and the stairs of `step` round it, and warm-up layers
    bound the default speedup.
    """
    least = least_layers(schedule.num_layers, schedule.warmup_layers)
    is_default = {request.speedup, request.max_layers, request.min_layers, request.alpha} == {None}
    if is_default and request.name in _SPEEDUP_SCHEDULES and least > schedule.num_layers / DEFAULT_SPEEDUP + 0.5:
        yield (
            f"at least {least} of {schedule.num_layers} layers are computed, so the default of {DEFAULT_SPEEDUP:g}x cannot "
            f"be reached: it is {schedule.num_layers / schedule.mean_layers:.2f}x"
        )
    speedup, rounding = request.speedup, 0.5  # layers
    fixed = request.alpha is not None or request.name.partition(":")[0] in ("table", "full")
    # a decay need not come down to min_layers
    may_end_higher = request.name == "power" and not fixed and request.max_variants is None
    checks = (
        ("--speedup", speedup, speedup and abs(schedule.num_layers / speedup - schedule.mean_layers) <= rounding),
        ("--max-layers", request.max_layers, request.max_layers == schedule.layers[0]),
        ("--min-layers", request.min_layers, may_end_higher or request.min_layers == schedule.layers[-1]),
        ("--span", request.span, request.span == schedule.span),
    )
    outcome = "changes nothing" if fixed else "is not met"
    for option, value, is_met in checks:
        if value is not None and not is_met:
            yield (
                f"{option} {value:g} {outcome}: the {schedule.name} schedule has {schedule.layers[0]} -> {schedule.layers[-1]} "
                f"layers over {schedule.span} positions, {schedule.num_layers / schedule.mean_layers:.2f}x fewer"
            )


def _check_depth(request: ScheduleRequest, num_layers: int) -> None:
    """Refuse what a model of this depth does not allow."""
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


def _layer_range(request: ScheduleRequest, span: int, num_layers: int) -> tuple[int, int]:
    """(min, max): what was given, else a 1:3 range around the mean that the speedup asks for."""
    least, lower, upper = least_layers(num_layers, request.warmup_layers), request.min_layers, request.max_layers
    if request.alpha is not None or (request.speedup is None and (lower, upper) != (None, None)):
        upper = num_layers if upper is None else upper
        half = num_layers / max(1.0, request.speedup or DEFAULT_SPEEDUP) / 2
        return min(upper, max(least, round(half))) if lower is None else lower, upper
    mean = _target_mean(request, span, num_layers)
    if request.name == "power":
        upper = num_layers if upper is None else upper
        if lower is None:
            rest = (mean * span - upper) / (span - 1) if span > 1 else mean  # the mean of the positions after the first
            lower = max(least, min(round(mean / 2), int(rest)))
        return lower, upper
    if span == 1:
        return round(mean), round(mean)
    if lower is None and upper is None:
        lower = max(least, round(max(mean / 2, 2 * mean - num_layers)))
    if lower is None:
        assert upper is not None
        lower = max(least, min(upper, round(2 * mean - upper)))
    return lower, max(lower, min(num_layers, round(2 * mean - lower))) if upper is None else upper


def _target_mean(request: ScheduleRequest, span: int, num_layers: int) -> float:
    """The mean layer count that the speedup asks for; for the default speedup, the nearest that can be reached.

    Raises:
        ScheduleError: the model's depth, or the ends that were given, do not allow the requested speedup.
    """
    speedup = DEFAULT_SPEEDUP if request.speedup is None else request.speedup
    low, high = _mean_range(request, span, num_layers)
    reachable = speedup >= 1 and low - 0.5 <= num_layers / speedup <= high + 0.5  # half a layer is rounding
    if reachable or request.speedup is None:  # the default was not asked for: take the nearest, which `unmet_requests` reports
        return min(max(num_layers / speedup, low), high)
    nearest = _round_down(num_layers / low) if speedup > num_layers / low else -_round_down(-num_layers / high)
    least = least_layers(num_layers, request.warmup_layers)
    ends = "" if (request.max_layers, request.min_layers) == (None, None) else ", with the given ends"
    raise ScheduleError(
        f"--speedup {speedup:g} cannot be reached by {num_layers} layers of which at least {least} are computed{ends}",
        f"the nearest that can is --speedup {nearest:g}",
    )


def _mean_range(request: ScheduleRequest, span: int, num_layers: int) -> tuple[float, float]:
    """The smallest and the largest mean layer count that the given ends allow."""
    least, lower, upper = least_layers(num_layers, request.warmup_layers), request.min_layers, request.max_layers
    if request.name == "power":
        upper = num_layers if upper is None else upper
        return (upper + (span - 1) * (least if lower is None else lower)) / span, upper
    if span == 1 and (lower is not None or upper is not None):
        only = lower if upper is None else upper
        assert only is not None
        return only, only
    if lower is not None and upper is not None:
        return (lower + upper) / 2, (lower + upper) / 2
    if upper is not None:
        return (least + upper) / 2, upper
    if lower is not None:
        return lower, (lower + num_layers) / 2
    return least, num_layers


def _round_down(value: float) -> float:
    """Round down to two decimals."""
    return math.floor(value * 100) / 100


def _linear(span: int, lower: int, upper: int) -> list[int]:
    return [round(upper - (upper - lower) * t / max(1, span - 1)) for t in range(span)]


def _step(request: ScheduleRequest, span: int, lower: int, upper: int) -> list[int]:
    stairs = max(1, min(request.max_variants or _DEFAULT_STAIRS, span))
    if stairs == 1:
        return [request.max_layers or request.min_layers or round((upper + lower) / 2)] * span
    levels = [round(upper - (upper - lower) * i / (stairs - 1)) for i in range(stairs)]
    return [levels[t * stairs // span] for t in range(span)]


def _power(request: ScheduleRequest, span: int, lower: int, upper: int, num_layers: int) -> list[int]:
    def counts(alpha: float) -> list[int]:
        return [max(lower, int(upper * alpha**t + 1e-9)) for t in range(span)]

    if request.alpha is not None:
        return counts(request.alpha)
    if request.speedup is None and (request.max_layers is not None or request.min_layers is not None):
        return counts((lower / upper) ** (1 / max(1, span - 1)))
    mean = _target_mean(request, span, num_layers)
    return counts(_bisect(lambda alpha: sum(counts(alpha)) / span - mean))


def _bisect(excess: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return high if excess(high) <= 0 else low


def _from_table(path: Path, request: ScheduleRequest, num_layers: int) -> Schedule:
    where = f"table {path}"
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ScheduleError(f"cannot be read ({error.strerror})", "name a JSON file", where=where) from error
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"is not JSON ({error})", "write a list of layer counts", where=where) from error
    warmup = request.warmup_layers
    if isinstance(data, dict):
        unknown = sorted(set(data) - {"layers", "warmup_layers"})
        if unknown or "layers" not in data:
            raise ScheduleError(f"has keys {sorted(data)}", 'give "layers" and, if wanted, "warmup_layers"', where=where)
        warmup, data = data.get("warmup_layers", warmup), data["layers"]
    if not isinstance(data, list) or any(type(count) is not int for count in [*data, warmup]):
        raise ScheduleError("is not a list of whole numbers", "write for example [24, 24, 18, 12]", where=where)
    if not data:
        raise ScheduleError("is empty", "write one layer count per position", where=where)
    if not 0 <= warmup <= num_layers:
        raise ScheduleError(f"warmup_layers {warmup}: the model has {num_layers} layers", f"choose 0..{num_layers}", where=where)
    return Schedule(name="table", num_layers=num_layers, warmup_layers=warmup, layers=tuple(data), anchor=request.anchor)


def _limit_variants(schedule: Schedule, max_variants: int | None) -> Schedule:
    """Round `k(t)` up to at most `max_variants` levels, each standing for an equal share of the distinct counts."""
    if max_variants is None or len(schedule.variants) <= max_variants:
        return schedule
    counts, rounded = schedule.variants, {}
    for i, count in enumerate(counts):
        group = i * max_variants // len(counts)
        rounded[count] = counts[-(-group * len(counts) // max_variants)]
    return replace(schedule, layers=tuple(rounded[count] for count in schedule.layers))
