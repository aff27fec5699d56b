"""An earlier run beside this one: what is significantly slower or faster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skipdecode.errors import CapacityError


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
        summaries = [summary for _, summary in _latencies(data)]
        data["machine"].get("cpu")
        return "validation_format" in data and all(summary[key] > 0 for summary in summaries for key in ("median", "low", "high"))
    except (AttributeError, KeyError, TypeError):
        return False


def compare(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Every latency that both runs have; significant where the medians' 95 % intervals lie apart.

    Returns:
        `same_machine`; and `rows`: name, old and new ms, ratio new over old, `verdict` (slower, faster, same).
    """
    before = dict(_latencies(old))
    rows = []
    for name, summary in _latencies(new):
        if name in before:
            was = before[name]
            verdict = "slower" if summary["low"] > was["high"] else "faster" if summary["high"] < was["low"] else "same"
            rows.append({
                "name": name, "old_ms": was["median"], "new_ms": summary["median"],
                "ratio": summary["median"] / was["median"], "verdict": verdict,
            })  # fmt: skip
    return {"same_machine": new["machine"]["cpu"] == old["machine"].get("cpu"), "rows": rows}


def _latencies(run: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    for target in run["targets"]:
        for cell in target.get("latency", []):
            where = f"{target['name']}, batch {cell['batch']}, context {cell['context']}"
            yield f"{where}: prefill", cell["prefill_ms"]
            for variant in cell["variants"]:
                yield f"{where}: {variant['name']}", variant["ms"]
        for load in target.get("workloads", []):
            where = f"{target['name']}, workload, batch {load['batch']}"
            yield f"{where}: first token", load["own"]["ttft_ms"]
            if load["own"]["token_ms"]:
                yield f"{where}: token", load["own"]["token_ms"]
