"""An earlier run beside this one: what is significantly slower or faster."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skipdecode.errors import CapacityError

_BETWEEN_STARTS = 1.1  # ratio by which the medians of two processes that run the same may differ


def read_baseline(path: Path) -> dict[str, Any]:
    """What an earlier `--json` wrote.

    Raises:
        CapacityError: unreadable, or something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CapacityError(
            f"cannot be read ({error})", "name a file that skip-validate --json wrote", where=f"--baseline {path}"
        ) from error
    if not _is_run(data):
        raise CapacityError("is no earlier run", "name a file that skip-validate --json wrote", where=f"--baseline {path}")
    run: dict[str, Any] = data
    return run


def _is_run(data: Any) -> bool:
    """Whether `compare` finds in it what it reads."""
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
    """Every latency that both runs have; significant where the medians' 95 % intervals lie apart, and the medians by more than
    a tenth: so much a process differs from the next one, which its own rounds do not show. Workloads of other lengths are not
    compared.

    Returns:
        `differs`: under what else the earlier run was measured, a line each; and `rows`: name, old and new ms, ratio new over
        old, `verdict` (slower, faster, same).
    """
    now, then = dict(_conditions(new)), dict(_conditions(old))
    differs = [f"{name}: {then[name]}, now {now[name]}" for name in now if name in then and now[name] != then[name]]
    was_read = dict(_bandwidths(old))
    differs += [
        f"{name}, memory bandwidth: {was_read[name]:.1f} GB/s, now {value:.1f}"
        for name, value in _bandwidths(new)
        if name in was_read and max(value / was_read[name], was_read[name] / value) > _BETWEEN_STARTS
    ]
    differs += [
        f"{which} run went on from one that was stopped: {run['resumed']} measurements are of another time"
        for which, run in (("the earlier", old), ("this", new))
        if run.get("resumed")
    ]
    same_workload = _workload(new) == _workload(old)
    if not same_workload:
        differs.append("the workload, which is left out here")
    before = dict(_latencies(old, workloads=same_workload))
    rows = []
    for name, summary in _latencies(new, workloads=same_workload):
        if name in before:
            was = before[name]
            ratio, verdict = summary["median"] / was["median"], "same"
            if summary["low"] > was["high"] and ratio > _BETWEEN_STARTS:
                verdict = "slower"
            if summary["high"] < was["low"] and 1 / ratio > _BETWEEN_STARTS:
                verdict = "faster"
            rows.append({
                "name": name, "old_ms": was["median"], "new_ms": summary["median"], "ratio": ratio, "verdict": verdict,
            })  # fmt: skip
    return {"differs": differs, "rows": rows}


def _conditions(run: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What latencies depend on beside the code and the libraries, whose versions are what one compares."""
    machine, bundle = run["machine"], run["bundle"]
    for fact in ("cpu", "cores", "gpu"):
        if fact in machine:  # the GPU was not named from the start
            yield fact, machine[fact]
    yield "model", bundle["model"]["name"]
    yield "layers", bundle["model"]["layers"]
    yield "schedule", f"{bundle['schedule']['name']}, {bundle['schedule']['speedup']:.2f}x fewer layers"
    for target in run["targets"]:
        if target["runs"]:
            for fact in ("weights", "threads"):
                yield f"{target['name']}, {fact}", target[fact]


def _bandwidths(run: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Each target's, GB/s: of one machine it changes with what else runs there."""
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
