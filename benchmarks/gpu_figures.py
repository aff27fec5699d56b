"""Turns what systems measured at a point into figures: medians, ratios round by round, shares of the bandwidth."""

from __future__ import annotations

import statistics
from typing import Any

from summary import decode_times

ONE_ENGINE = "one engine"
QUANTIZED = ("int8", "int4")
Cells = dict[str, list[dict[str, Any]]]  # system -> what each of its turns gave


def kind_of(system: str) -> str:
    """What a system's weights are stored in: the last word of its name if they are quantised, else fp16."""
    last = system.split()[-1]
    return last if last in QUANTIZED else "fp16"


def add_turns(point: dict[str, Any], turns: Cells, gb_per_s: float) -> list[dict[str, Any]]:
    """Add to a point's figures what they lack; returns the new rows.

    Peers, the one engine and quantised weights are compared with the chain of segments that took turns with them.
    """
    chain = next((system for system, cells in turns.items() if "variants" in cells[0] and _is_the_chain(system)), None)
    ours = _times(turns[chain], 0) if chain else []
    rows: list[dict[str, Any]] = []
    for system, cells in turns.items():
        if "variants" in cells[0]:
            rows += _variants(system, cells, gb_per_s, turns[chain] if chain and kind_of(system) != "fp16" else None)
            point["prefill_ms"].setdefault(system, round(statistics.median(cell["prefill_ms"] for cell in cells), 2))
        else:
            rows.append(_peer(system, cells, ours))
    if chain and ONE_ENGINE in turns:
        pairs = zip(ours, _times(turns[ONE_ENGINE], 0), strict=False)  # either may have failed in a later round
        point["price_of_segments"] = round(statistics.median(segments / one for segments, one in pairs), 4)
    old = {row["system"] for row in point["systems"]}
    new = [row for row in rows if row["system"] not in old]
    point["systems"] += new
    return new


def show(model: str, point: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print a point's new rows."""
    prompts = ", ".join(f"{kind} {ms:.1f}" for kind, ms in point["prefill_ms"].items())
    print(f"\n{model}, {point['batch']} rows on {point['context']} positions, ms a step (ms of prompts: {prompts})")
    for row in rows:
        text = f"  {row['system']:42}{row['decode_ms_per_step']:9.3f}"
        if "gain" in row:
            text += f"  {row['gain']:.2f}x of {row['promised_gain']:.2f}x  {row['share_of_copy_bandwidth']:.0%} of copy bandwidth"
            text += f"  {row['host_us']:.0f} us on the host"
            text += f"  {row['times_as_fast_as_fp16']:.2f}x as fast as fp16" if "times_as_fast_as_fp16" in row else ""
        elif "skipdecode_full_depth_times_as_fast" in row:
            text += f"  full depth here: {row['skipdecode_full_depth_times_as_fast']:.2f}x as fast"
        print(text)
    if any(ONE_ENGINE in row["system"] for row in rows) and "price_of_segments" in point:
        print(f"  the chain of segments takes {point['price_of_segments']:.3f}x one engine's time", flush=True)


def _is_the_chain(system: str) -> bool:
    return system != ONE_ENGINE and kind_of(system) == "fp16"


def _times(cells: list[dict[str, Any]], index: int) -> list[float]:
    """A variant's ms a step in each round."""
    return [statistics.median(cell["variants"][index]["ms"]) for cell in cells]


def _variants(
    system: str, cells: list[dict[str, Any]], gb_per_s: float, fp16: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """One row per variant. `fp16`: the cells of the same variants in fp16 that took turns with these."""
    rows = []
    full, variants = _times(cells, 0), cells[0]["variants"]
    for index, variant in enumerate(variants):
        times = _times(cells, index)
        ms = statistics.median(times)
        row = {"system": f"skipdecode {system} {variant['name']}", "kind": kind_of(system), "rounds": len(cells)} | decode_times(
            times
        )
        if fp16:
            pairs = zip(_times(fp16, index), times, strict=False)
            row["times_as_fast_as_fp16"] = round(statistics.median(theirs / mine for theirs, mine in pairs), 4)
        rows.append(row | {
            "layers": variant["layers"],
            "read_bytes": variant["read_bytes"],
            "share_of_copy_bandwidth": round(variant["read_bytes"] / gb_per_s / 1e6 / ms, 4),
            "gain": round(statistics.median(whole / part for whole, part in zip(full, times, strict=True)), 4),
            "promised_gain": round(variants[0]["read_bytes"] / variant["read_bytes"], 4),
            "host_us": round(statistics.median(us for cell in cells for us in cell["variants"][index]["host_us"]), 1),
            "graphs": cells[-1]["graphs"],
        })  # fmt: skip
    return rows


def _peer(system: str, cells: list[dict[str, Any]], ours: list[float]) -> dict[str, Any]:
    times = [cell["ms"] for cell in cells]
    row = {"system": system, "kind": "fp16", "rounds": len(cells)} | decode_times(times)
    row |= {key: value for key, value in cells[-1].items() if key != "ms"}
    ratios = [theirs / mine for theirs, mine in zip(times, ours, strict=False)]  # one may have failed in a later round
    if not ratios:
        return row
    # this runtime's figure in these turns, which can differ from that of the first stage, alone on the GPU
    in_turns = {"skipdecode_full_depth_ms": round(statistics.median(ours), 4)}
    return row | in_turns | {"skipdecode_full_depth_times_as_fast": round(statistics.median(ratios), 4)}
