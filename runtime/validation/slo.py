"""Service level objectives, such as `p99_token_ms<=30`: gates on what was measured."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from skipdecode.errors import CapacityError

_LATENCIES = {
    f"{quantile}_{short}_ms": (f"{meaning}, with the schedule, worst batch size", (key, field))
    for short, key, meaning in (("token", "token_ms", "time of a decode step"), ("ttft", "ttft_ms", "time to first token"))
    for quantile, field in (("p50", "median"), ("p90", "p90"), ("p99", "p99"))
}
NAMES: dict[str, str] = {
    **{name: meaning for name, (meaning, _) in _LATENCIES.items()},
    "tokens_per_s": "generated tokens a second, prefill included, worst batch size",
    "decode_gain": "wall-clock gain of the schedule over full depth, decode only, worst batch size",
    "end_to_end_gain": "the same with prefill",
    "resident_mib": "resident memory after load",
    "max_logit_error": "against the reference, worst variant (with --reference)",
    "bleu": "at the bundle's own schedule (with --eval)",
    "rouge_l": "at the bundle's own schedule, 0-100 (with --eval)",
}
SECOND_TOKEN = "--new-tokens 2"  # the first token takes no decode step
_NEEDS = {
    "max_logit_error": "--reference",
    "bleu": "--eval",
    "rouge_l": "--eval",
    **dict.fromkeys(("p50_token_ms", "p90_token_ms", "p99_token_ms", "decode_gain"), SECOND_TOKEN),
}
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": lambda value, bound: value <= bound,
    ">=": lambda value, bound: value >= bound,
    "<": lambda value, bound: value < bound,
    ">": lambda value, bound: value > bound,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A bound on one figure."""

    name: str  # one of NAMES
    operator: str  # one of <= >= < >
    bound: float  # in the unit that the name ends in

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{self.bound:.15g}"

    def holds(self, value: float) -> bool:
        """Whether `value` is within the bound."""
        return _OPERATORS[self.operator](value, self.bound)

    def format_value(self, value: float) -> str:
        """`value` in seven digits, or in all its digits where seven would put it on the bound or on the other side of it."""
        rounded = f"{value:.7g}"
        misleads = self.holds(float(rounded)) != self.holds(value) or float(rounded) == self.bound
        return repr(value).removesuffix(".0") if misleads else rounded


def parse_slo(text: str) -> Slo:
    """Parse `NAME OPERATOR NUMBER`, with the number in the unit that the name ends in.

    Raises:
        CapacityError: not of that form, or an unknown name.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*(\S*)\s*", text)
    if match is None:
        raise CapacityError(f"{text!r} is not an objective", 'write for example "p99_token_ms<=30"', where="--slo")
    name, operator, number, unit = match.groups()
    if name not in NAMES:
        raise CapacityError(f"{name!r} is not measured", f"choose one of {', '.join(NAMES)}", where="--slo")
    if unit:
        raise CapacityError(
            f"{text!r}: unit {unit!r} after the number", f"leave it out: the name {name} includes the unit", where="--slo"
        )
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise CapacityError(f"{number!r} is not a number", 'write for example "p99_token_ms<=30"', where="--slo")
    return Slo(name=name, operator=operator, bound=bound)


def check_measured(slos: list[Slo], options: set[str], in_workload: bool = False) -> None:
    """Raise CapacityError if an objective needs an option that was not given. `in_workload`: a file sets the token counts."""
    for slo in slos:
        needed = _NEEDS.get(slo.name)
        if needed and needed not in options:
            needed = "a request of 2 new_tokens in --workload" if needed == SECOND_TOKEN and in_workload else needed
            raise CapacityError(f"{slo.name} is measured only with {needed}", f"add {needed}, or drop it", where="--slo")


def judge(slos: list[Slo], target: dict[str, Any]) -> list[dict[str, Any]]:
    """Each objective with the worst figure for it among `target`'s results, that figure as text, and whether it holds.

    The text of a p90 or p99 adds the number of measurements: of only a few, it is little more than the largest.
    """
    judged = []
    for slo in slos:
        sign = 1 if slo.operator.startswith("<") else -1
        worst, count = max(_values(slo.name, target), key=lambda each: math.inf if math.isnan(each[0]) else sign * each[0])
        measured = slo.format_value(worst) + (f" (of {count})" if slo.name.startswith(("p90", "p99")) else "")
        judged.append({"slo": str(slo), "value": worst, "measured": measured, "holds": slo.holds(worst)})
    return judged


def _values(name: str, target: dict[str, Any]) -> Iterator[tuple[float, int | None]]:
    """Each figure that the objective is about, and for latencies the number of measurements behind it."""
    if name in _LATENCIES:
        key, field = _LATENCIES[name][1]
        yield from ((load["own"][key][field], load["own"][key]["n"]) for load in target["workloads"])
    elif name == "tokens_per_s":
        yield from ((load["own"][name]["median"], None) for load in target["workloads"])
    elif name in ("decode_gain", "end_to_end_gain"):
        yield from ((load[name]["median"], None) for load in target["workloads"])
    elif name == "resident_mib":
        yield target["memory"]["resident_bytes"] / 2**20, None
    elif name == "max_logit_error":
        yield from ((variant[name], None) for variant in target["parity"])
    else:
        yield next(row[name]["value"] for row in target["quality"] if row["own"]), None
