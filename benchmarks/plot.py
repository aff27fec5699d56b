"""One picture of a decode run: a bar a system, milliseconds a token, shorter is faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_OURS, _PEER = "#1f6f8b", "#b8b8b8"


def plot(result: dict[str, Any], path: Path) -> None:
    """Write the PNG; whiskers are the fastest and slowest round, ratios are against transformers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = result["models"]
    figure, axes = pyplot.subplots(1, len(models), figsize=(7 * len(models), 4.2), squeeze=False, layout="constrained")
    for axis, (name, figures) in zip(axes[0], models.items(), strict=True):
        _draw(axis, f"{name}, {figures['layers']} layers", figures["systems"])
    machine, settings = result["machine"], result["settings"]
    figure.suptitle(
        f"Decode at batch 1, fp32, {settings['threads']} threads, {machine['cpu']} ({machine['cores']} cores), "
        f"medians of {settings['rounds']} interleaved rounds",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


def _draw(axis: Any, title: str, rows: list[dict[str, Any]]) -> None:
    peer = next(row["decode_ms_per_token"] for row in rows if row["system"] == "transformers")
    names = [row["system"] for row in rows]
    values = [row["decode_ms_per_token"] for row in rows]
    whiskers = [
        [row["decode_ms_per_token"] - row["decode_ms_per_token_min"] for row in rows],
        [row["decode_ms_per_token_max"] - row["decode_ms_per_token"] for row in rows],
    ]
    colours = [_OURS if name.startswith("skipdecode") else _PEER for name in names]
    axis.barh(names, values, color=colours, xerr=whiskers, ecolor="#444444", capsize=2)
    for index, row in enumerate(rows):
        label = f"{values[index]:.1f} ms  {peer / values[index]:.1f}x"
        axis.text(row["decode_ms_per_token_max"] + 0.01 * max(values), index, label, va="center", fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.3 * max(row["decode_ms_per_token_max"] for row in rows))
    axis.set_xlabel("ms per token (and how many times as fast as transformers)")
    axis.set_title(title, fontsize=10)
