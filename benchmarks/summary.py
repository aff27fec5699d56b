"""Turns runs into figures: medians, spreads, ratios round by round, and each system's share of the memory bound."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from systems import System

_COLUMNS = (
    ("ms/step", "decode_ms_per_step", "8.2f"),
    ("min", "decode_ms_per_step_min", "7.2f"),
    ("max", "decode_ms_per_step_max", "7.2f"),
    ("vs ours", "times_as_fast_as_skipdecode_full", "8.2f"),
    ("promised", "promised_gain", "9.2f"),
    ("gain/prom.", "gain_over_promise", "10.1%"),
    ("of bound", "share_of_read_bound", "9.1%"),
    ("prompt ms", "first_token_ms", "10.1f"),
    ("same", "tokens_as_transformers", "5d"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """What every system is given: a number of rows, and of prompt tokens in each."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"


def summarize(systems: list[System], bandwidth: list[float], point: Point) -> dict[str, Any]:
    """One point's figures. Ratios are medians of the rounds' ratios, so that what slowed a round slows both sides."""
    rows = []
    for system in systems:
        full = _full_depth(systems, system.kind)
        row = _row(system, full, systems)
        full_bytes = _mean_bytes(full, full, point)
        own_bytes = _mean_bytes(full, system, point) if system.reads else full_bytes
        if system.reads or system.kind == "fp32":  # peers' other kinds have their own sizes
            row["read_mb_per_step"] = round(own_bytes / 1e6, 1)
            row["share_of_read_bound"] = round(own_bytes / (statistics.median(bandwidth) * 1e6) / row["decode_ms_per_step"], 4)
        if system.reads:
            row |= _promise(system, full_bytes / own_bytes, row)
        rows.append(row)
    return {
        "batch": point.batch,
        "context": point.context,
        "rounds": len(systems[0].runs),
        "read_bandwidth_gb_per_s": {"median": round(statistics.median(bandwidth), 2), **_spread(bandwidth, 2)},
        "systems": rows,
    }


def decode_times(values: Sequence[float]) -> dict[str, float]:
    """The median, the fastest and the slowest of the rounds' milliseconds a step; what `plot.py` draws."""
    ends = {f"decode_ms_per_step_{end}": value for end, value in _spread(values, 3).items()}
    return {"decode_ms_per_step": round(statistics.median(values), 3), **ends}


def show_point(model: str, figures: dict[str, Any]) -> None:
    """Print one point's table."""
    bandwidth = figures["read_bandwidth_gb_per_s"]
    print(f"\n{model}, {figures['batch']} rows, prompts of {figures['context']}, {figures['rounds']} rounds; "
          f"read bandwidth {bandwidth['median']} GB/s ({bandwidth['min']} to {bandwidth['max']})")  # fmt: skip
    widths = [max(len(title), int(form.rstrip("fd%").split(".")[0])) for title, _, form in _COLUMNS]
    print(f"{'':28}" + " ".join(f"{title:>{width}}" for (title, _, _), width in zip(_COLUMNS, widths, strict=True)))
    for row in figures["systems"]:
        cells = ("" if row.get(key) is None else f"{row[key]:{form}}" for _, key, form in _COLUMNS)
        print(f"{row['system']:28}" + " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)), flush=True)


def show_model(model: str, figures: dict[str, Any]) -> None:
    """Print what is measured once per model."""
    sharing = figures["weight_sharing"]
    counts = f"{sharing['variants']} variants over {sharing['variants_of_one']}"
    print(f"\n{model}: memory of {counts}: rss {sharing['rss_ratio']}x, uss {sharing['uss_ratio']}x")
    for name, outside in figures["outside_engines_us_per_step"].items():
        print(f"{name}: {outside['median']:.0f} us a step outside {outside['engine_calls_per_step']:.1f} engine calls")


def _full_depth(systems: list[System], kind: str) -> System:
    """This runtime at full depth with weights of `kind`, or of the first kind if that one was not asked for."""
    return next((system for system in systems if system.kind == kind and system.reads), systems[0])


def _row(system: System, full: System, systems: list[System]) -> dict[str, Any]:
    decode = [run.decode_ms for run in system.runs]
    ratios = [ours.decode_ms / run.decode_ms for ours, run in zip(full.runs, system.runs, strict=True)]
    end_to_end = [ours.total_s / run.total_s for ours, run in zip(full.runs, system.runs, strict=True)]
    prefill = [ours.token_s[0] / run.token_s[0] for ours, run in zip(full.runs, system.runs, strict=True)]
    fp32_full = _full_depth(systems, "fp32")
    over_fp32 = [ours.decode_ms / run.decode_ms for ours, run in zip(fp32_full.runs, system.runs, strict=True)]
    reference = next(each for each in systems if each.name.startswith("transformers"))
    return {
        "system": system.name,
        "kind": system.kind,
        **decode_times(decode),
        "times_as_fast_as_skipdecode_full": round(statistics.median(ratios), 3),  # of the same kind of weights
        **{f"times_as_fast_as_skipdecode_full_{end}": value for end, value in _spread(ratios, 3).items()},
        "times_as_fast_as_skipdecode_fp32_full": round(statistics.median(over_fp32), 3),
        "end_to_end_times_as_fast_as_skipdecode_full": round(statistics.median(end_to_end), 3),
        "first_token_ms": round(statistics.median(1e3 * run.token_s[0] for run in system.runs), 2),
        "prompt_times_as_fast_as_skipdecode_full": round(statistics.median(prefill), 3),
        "tokens_as_transformers": _same(system.runs[0].token_ids, reference.runs[0].token_ids),
    }


def _promise(system: System, promised: float, row: dict[str, Any]) -> dict[str, Any]:
    layers, reads = system.runs[0].layers, system.reads
    assert reads is not None
    return {
        "variants": len(reads.manifest.variants),
        "layers_first_last": [layers[0], layers[-1]],
        "layers_mean": round(statistics.fmean(layers), 3),
        "layer_count_gain": round(reads.manifest.model.num_layers / statistics.fmean(layers), 3),
        "promised_gain": round(promised, 3),
        "gain_over_promise": round(row["times_as_fast_as_skipdecode_full"] / promised, 4),
    }


def _mean_bytes(full: System, system: System, point: Point) -> float:
    """Mean bytes that a decode step reads over a run: in step i every row attends to its prompt and i + 1 generated positions."""
    reads, layers = system.reads or full.reads, system.runs[0].layers or full.runs[0].layers
    assert reads is not None
    return statistics.fmean(reads.of(count, point.batch, point.context + step + 1) for step, count in enumerate(layers))


def weight_sharing(systems: list[System], memory: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Memory of the bundle with most variants against the full-depth one, both of the first kind, after their generate calls."""
    ours = [system for system in systems if system.reads and system.kind == systems[0].kind]
    counts = {system.name: len(system.reads.manifest.variants) for system in ours if system.reads}
    most_variants, full = max(ours, key=lambda system: counts[system.name]), ours[0]
    ratios = {
        f"{kind}_ratio": round(memory[most_variants.name][kind] / memory[full.name][kind], 4) for kind in ("rss", "pss", "uss")
    }
    return {"variants": counts[most_variants.name], "variants_of_one": counts[full.name], **ratios}


def _same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def _spread(values: Sequence[float], digits: int) -> dict[str, float]:
    return {"min": round(min(values), digits), "max": round(max(values), digits)}
