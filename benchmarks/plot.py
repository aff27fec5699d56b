"""One picture of a decode run: a panel per model and point, a bar per system, in milliseconds a step (shorter is faster)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_OURS = {"fp32": "#1f6f8b", "fp16": "#1f6f8b", "int8": "#4fa3bd", "int4": "#98cfdf"}
_PEER = {"fp32": "#8c8c8c", "fp16": "#8c8c8c", "int8": "#b4b4b4", "int4": "#d6d6d6"}


def plot(result: dict[str, Any], path: Path, title: str) -> None:
    """Write the PNG: values are medians, whiskers the fastest and slowest round, ratios against transformers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = result["models"]
    columns = max(len(figures["points"]) for figures in models.values())
    figure, axes = pyplot.subplots(
        len(models), columns, figsize=(6 * columns, 4.6 * len(models)), squeeze=False, layout="constrained"
    )
    for row, (name, figures) in zip(axes, models.items(), strict=True):
        for axis in row[len(figures["points"]) :]:
            axis.axis("off")
        for axis, point in zip(row, figures["points"], strict=False):
            _draw(axis, f"{name}, {point['batch']} x {point['context']} tokens, {point['rounds']} rounds", point["systems"])
    figure.suptitle(title)
    figure.savefig(path, dpi=80)


def _draw(axis: Any, title: str, rows: list[dict[str, Any]]) -> None:
    peer = next((row["decode_ms_per_step"] for row in rows if row["system"].startswith("transformers")), None)
    names = [row["system"] for row in rows]
    values = [row["decode_ms_per_step"] for row in rows]
    whiskers = [
        [row["decode_ms_per_step"] - row["decode_ms_per_step_min"] for row in rows],
        [row["decode_ms_per_step_max"] - row["decode_ms_per_step"] for row in rows],
    ]
    colours = [(_OURS if row["system"].startswith("skipdecode") else _PEER)[row["kind"]] for row in rows]
    axis.barh(names, values, color=colours, xerr=whiskers, ecolor="#444444", capsize=2)
    for index, row in enumerate(rows):
        label = f"{values[index]:.{1 if values[index] >= 10 else 2}f} ms" + (f"  {peer / values[index]:.1f}x" if peer else "")
        axis.text(row["decode_ms_per_step_max"] + 0.01 * max(values), index, label, va="center", fontsize=8)
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlim(0, 1.3 * max(row["decode_ms_per_step_max"] for row in rows))
    axis.set_xlabel("ms a step (and how many times as fast as transformers)", fontsize=8)
    axis.set_title(title, fontsize=10)
