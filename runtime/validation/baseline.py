"""Compare a run with an earlier one: what is significantly slower or faster."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skipdecode.errors import CapacityError

_MAX_RATIO_BETWEEN_STARTS = 1.1  # the medians of two processes that run the same code may differ by this ratio


def read_baseline(path: Path) -> dict[str, Any]:
    """Read what an earlier `--json` wrote.

    Raises:
        CapacityError: unreadable, or not such a result.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CapacityError(
            f"cannot be read ({error})", "name a file that skip-validate --json wrote", where=f"--baseline {path}"
        ) from error
    if not _is_run(data):
        raise CapacityError(
            "is not the result of an earlier run", "name a file that skip-validate --json wrote", where=f"--baseline {path}"
        )
    run: dict[str, Any] = data
    return run


def _is_run(data: Any) -> bool:
    """Whether `data` holds everything that `compare` reads."""
    try:
        summaries = [summary for _, summary in _latencies(data, workloads=True)]
        dict(_conditions(data))
        _workload(data)
        figures = [*(value for _, value in _bandwidths(data)), 1 + data.get("resumed", 0)]
        return "validation_format" in data and all(
            0 < value < math.inf
            for value in (*figures, *(summary[key] for summary in summaries for key in ("median", "low", "high")))
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def compare(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Compare every latency that both runs have.

    A latency is slower or faster where the 95 % intervals of the medians do not overlap and the medians differ by more than a
    tenth. Two processes running the same code differ by as much, which the rounds within one process do not show. Workloads of
    different lengths are not compared.

    Returns:
        `differs`: conditions that were different in the earlier run, one line each. `rows`: name, old and new ms, ratio of new
        to old, `verdict` (slower, faster, same).
    """
    now, then = dict(_conditions(new)), dict(_conditions(old))
    differs = [f"{name}: {then[name]}, now {now[name]}" for name in now if name in then and now[name] != then[name]]
    old_bandwidths = dict(_bandwidths(old))
    differs += [
        f"{name}, memory bandwidth: {old_bandwidths[name]:.1f} GB/s, now {value:.1f}"
        for name, value in _bandwidths(new)
        if name in old_bandwidths and max(value / old_bandwidths[name], old_bandwidths[name] / value) > _MAX_RATIO_BETWEEN_STARTS
    ]
    differs += [
        f"{which} run resumed one that was stopped: {run['resumed']} measurements are from another time"
        for which, run in (("the earlier", old), ("this", new))
        if run.get("resumed")
    ]
    same_workload = _workload(new) == _workload(old)
    if not same_workload:
        differs.append("the workload, which is left out here")
    old_latencies = dict(_latencies(old, workloads=same_workload))
    rows = []
    for name, summary in _latencies(new, workloads=same_workload):
        if name in old_latencies:
            old_summary = old_latencies[name]
            ratio, verdict = summary["median"] / old_summary["median"], "same"
            if summary["low"] > old_summary["high"] and ratio > _MAX_RATIO_BETWEEN_STARTS:
                verdict = "slower"
            if summary["high"] < old_summary["low"] and 1 / ratio > _MAX_RATIO_BETWEEN_STARTS:
                verdict = "faster"
            rows.append({
                "name": name, "old_ms": old_summary["median"], "new_ms": summary["median"], "ratio": ratio, "verdict": verdict,
            })  # fmt: skip
    return {"differs": differs, "rows": rows}


def _conditions(run: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What latencies depend on besides code and library versions, which are what a baseline is there to compare."""
    machine, bundle = run["machine"], run["bundle"]
    for fact in ("cpu", "cores", "gpu"):
        if fact in machine:  # older results do not name the GPU
            yield fact, machine[fact]
    yield "model", bundle["model"]["name"]
    yield "layers", bundle["model"]["layers"]
    yield "schedule", f"{bundle['schedule']['name']}, {bundle['schedule']['speedup']:.2f}x fewer layers"
    for target in run["targets"]:
        if target["runs"]:
            for fact in ("weights", "threads"):
                yield f"{target['name']}, {fact}", target[fact]


def _bandwidths(run: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Each target's memory bandwidth, GB/s. On one machine it changes with what else runs there."""
    for target in run["targets"]:
        if target.get("read_gb_per_s") is not None:
            yield target["name"], target["read_gb_per_s"]


def _workload(run: dict[str, Any]) -> Any:
    settings = run["settings"]
    return settings["workload"] or (settings["prompt_tokens"], settings["new_tokens"])


def _latencies(run: dict[str, Any], *, workloads: bool) -> Iterator[tuple[str, dict[str, float]]]:
    for target in run["targets"]:
        for cell in target.get("latency", []):
            where = f"{target['name']}, batch {cell['batch']}, context {cell['context']}"
            yield f"{where}: prefill", cell["prefill_ms"]
            for variant in cell["variants"]:
                yield f"{where}: {variant['name']}", variant["ms"]
        for load in target.get("workloads", []) if workloads else ():
            where = f"{target['name']}, workload, batch {load['batch']}"
            yield f"{where}: first token", load["own"]["ttft_ms"]
            if load["own"]["token_ms"]:
                yield f"{where}: token", load["own"]["token_ms"]
