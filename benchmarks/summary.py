"""From runs to figures: medians, spreads, ratios round by round, and each system's share of the memory bound."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from models import Shape
from peers import Run
from worker import Worker

_FULL = "skipdecode full depth"
_COLUMNS = (
    ("ms/token", "decode_ms_per_token", "8.2f"),
    ("min", "decode_ms_per_token_min", "7.2f"),
    ("max", "decode_ms_per_token_max", "7.2f"),
    ("vs full", "times_as_fast_as_skipdecode_full", "8.2f"),
    ("promised", "promised_gain", "9.2f"),
    ("gain/prom.", "gain_over_promise", "10.1%"),
    ("of bound", "share_of_read_bound", "9.1%"),
    ("prefill ms", "first_token_ms", "10.1f"),
    ("rss MiB", "rss_mib", "8.0f"),
    ("outside us", "outside_engines_us_per_step", "10.0f"),
    ("same", "tokens_as_transformers", "5d"),
)


@dataclass(frozen=True, slots=True)
class Load:
    """What every system was given."""

    batch: int
    prompt: int  # tokens a row
    quantize: str  # of this runtime


@dataclass(slots=True, kw_only=True)
class System:
    """One system and what its rounds gave."""

    name: str
    worker: Worker
    variants: int | None = None  # of its bundle; None: not this runtime
    runs: list[Run] = field(default_factory=list)


def summarize(
    systems: list[System],
    shape: Shape,
    bandwidth: list[float],
    memory: dict[str, dict[str, float]],
    outside: dict[str, dict[str, float]],
    load: Load,
) -> dict[str, Any]:
    """One model's figures. Ratios are medians of each round's ratio, so that what slowed a round slows both sides."""
    runs = {system.name: system.runs for system in systems}
    full_bytes = statistics.fmean(_step_bytes(shape, runs[_FULL][0], load))
    rows = []
    for system in systems:
        row = _row(system, runs, memory[system.name])
        own_bytes = statistics.fmean(_step_bytes(shape, system.runs[0], load)) if system.variants else full_bytes
        if system.variants or (load.quantize == "none" and "int8" not in system.name):
            row["read_mb_per_step"] = round(own_bytes / 1e6, 1)
            row["share_of_read_bound"] = round(own_bytes / (statistics.median(bandwidth) * 1e6) / row["decode_ms_per_token"], 4)
        if system.variants:
            row |= _ours(system, shape, outside[system.name], full_bytes / own_bytes, row)
        rows.append(row)
    return {
        "layers": shape.num_layers,
        "layer_mb": round(shape.layer_bytes / 1e6, 2),
        "head_mb": round(shape.head_bytes / 1e6, 2),
        "read_bandwidth_gb_per_s": {"median": round(statistics.median(bandwidth), 2), **_spread(bandwidth, 2)},
        "systems": rows,
        "weight_sharing": _weight_sharing(systems, memory),
    }


def show_model(name: str, figures: dict[str, Any]) -> None:
    """Print one model's table."""
    bandwidth = figures["read_bandwidth_gb_per_s"]
    print(f"\n{name}: {figures['layers']} layers of {figures['layer_mb']} MB, head {figures['head_mb']} MB; "
          f"read bandwidth {bandwidth['median']} GB/s ({bandwidth['min']} to {bandwidth['max']})")  # fmt: skip
    widths = [max(len(title), int(form.rstrip("fd%").split(".")[0])) for title, _, form in _COLUMNS]
    print(f"{'':24}" + " ".join(f"{title:>{width}}" for (title, _, _), width in zip(_COLUMNS, widths, strict=True)))
    for row in figures["systems"]:
        cells = ("" if row.get(key) is None else f"{row[key]:{form}}" for _, key, form in _COLUMNS)
        print(f"{row['system']:24}" + " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    sharing = figures["weight_sharing"]
    counts = f"{sharing['variants']} variants over {sharing['variants_of_one']}"
    print(f"memory of {counts}: rss {sharing['rss_ratio']}x, uss {sharing['uss_ratio']}x")


def _row(system: System, runs: dict[str, list[Run]], memory: dict[str, float]) -> dict[str, Any]:
    decode = [run.decode_ms for run in system.runs]
    ratios = [full.decode_ms / run.decode_ms for full, run in zip(runs[_FULL], system.runs, strict=True)]
    ends = [full.total_s / run.total_s for full, run in zip(runs[_FULL], system.runs, strict=True)]
    return {
        "system": system.name,
        "decode_ms_per_token": round(statistics.median(decode), 3),
        **{f"decode_ms_per_token_{end}": value for end, value in _spread(decode, 3).items()},
        "times_as_fast_as_skipdecode_full": round(statistics.median(ratios), 3),
        **{f"times_as_fast_as_skipdecode_full_{end}": value for end, value in _spread(ratios, 3).items()},
        "end_to_end_times_as_fast_as_skipdecode_full": round(statistics.median(ends), 3),
        "first_token_ms": round(statistics.median(1e3 * run.token_s[0] for run in system.runs), 2),
        "tokens_as_transformers": _same(system.runs[0].token_ids, runs["transformers"][0].token_ids),
        **{f"{name}_mib": value for name, value in memory.items()},
    }


def _ours(system: System, shape: Shape, outside: dict[str, float], promised: float, row: dict[str, Any]) -> dict[str, Any]:
    layers = system.runs[0].layers
    return {
        "variants": system.variants,
        "layers_first_last": [layers[0], layers[-1]],
        "layers_mean": round(statistics.fmean(layers), 3),
        "layer_count_gain": round(shape.num_layers / statistics.fmean(layers), 3),
        "promised_gain": round(promised, 3),
        "gain_over_promise": round(row["times_as_fast_as_skipdecode_full"] / promised, 4),
        "outside_engines_us_per_step": round(outside["median"], 1),
        "outside_engines_us_per_step_mean": round(outside["mean"], 1),
        "engine_calls_per_step": round(outside["engine_calls_per_step"], 2),
    }


def _weight_sharing(systems: list[System], memory: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The bundle with the most variants against the one at full depth, after their generate calls."""
    most = max(systems, key=lambda system: system.variants or 0)
    full = next(system for system in systems if system.name == _FULL)
    ratios = {f"{kind}_ratio": round(memory[most.name][kind] / memory[_FULL][kind], 4) for kind in ("rss", "pss", "uss")}
    return {"variants": most.variants, "variants_of_one": full.variants, **ratios}


def _step_bytes(shape: Shape, run: Run, load: Load) -> list[int]:
    """Of each decode step: in step i every row attends to its prompt and i + 1 generated positions."""
    return [shape.step_bytes(count, load.batch * (load.prompt + step + 1)) for step, count in enumerate(run.layers)]


def _same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def _spread(values: Sequence[float], digits: int) -> dict[str, float]:
    return {"min": round(min(values), digits), "max": round(max(values), digits)}
