"""The short tables that `skip-validate` prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skipdecode.text import printable
from skipdecode.validation.quality import DEFAULT_TOKENIZER
from skipdecode.validation.samples import Summary

_LOG_WIDTH = 100_000  # columns, for logs: rich would wrap at 80, and a search would miss phrases that it broke


def show(result: dict[str, Any]) -> None:
    """Print what was measured, one table per question."""
    result = _displayable(result)
    width, height = (None, None) if sys.stdout.isatty() else (_LOG_WIDTH, 1)  # rich ignores a width without a height if TERM=dumb
    console = Console(width=width, height=height, markup=False, emoji=False)  # names can hold anything
    with console.capture() as captured:  # where the reader of a pipe has left, rich itself ends the process with status 1
        console.print(Text(_heading(result)))
        for target in result["targets"]:
            if not target["runs"]:
                console.print(f"target {target['name']} does not run here: {target['why']}")
                continue
            for table in _tables(target):
                console.print(table)
        if result["baseline"]:
            for part in _baseline(result["baseline"]):
                console.print(part)
        if result["slo"]:
            console.print(_slo(result["slo"]))
        console.print(Text("all holds" if result["holds"] else "does not hold", style="green" if result["holds"] else "bold red"))
    print(captured.get(), end="")


def _displayable(value: Any) -> Any:
    """A result whose texts a terminal only displays."""
    if isinstance(value, dict):
        return {key: _displayable(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(_displayable, value))
    return printable(value) if isinstance(value, str) else value


def _heading(result: dict[str, Any]) -> str:
    bundle, machine, integrity = result["bundle"], result["machine"], result["integrity"]
    schedule, gpu = bundle["schedule"], f", {machine['gpu']}" if machine["gpu"] else ""
    whole = f"{integrity['files']} files match the manifest" if integrity["holds"] else f"damaged: {integrity['what']}"
    resumed = f"\n{result['resumed']} measurements come from an earlier run that was stopped" if result["resumed"] else ""
    return (
        f"{bundle['model']['name']}: {bundle['model']['layers']} layers, schedule {schedule['name']} "
        f"{schedule['layers'][0]} -> {schedule['layers'][-1]} over {len(schedule['layers'])} positions "
        f"({schedule['speedup']:.2f}x fewer layers), {len(bundle['variants'])} variants; {whole}\n"
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB{gpu}{resumed}"
    )


def _tables(target: dict[str, Any]) -> Iterator[Table]:
    if target["parity"]:
        yield _parity(target)
    if target["plans"]:
        yield _plans(target)
    yield _latency(target)
    yield _workloads(target)
    if target["quality"]:
        yield _quality(target)


def _table(title: str | None, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _parity(target: dict[str, Any]) -> Table:
    table = _table(f"{target['name']}: against the reference", "variant", "max error", "mean error", "of largest",
                   "median step", "at most", "first token that differs", "max KV error", "")  # fmt: skip
    for row in target["parity"]:
        errors = [error for layer in row["kv"] for name, error in layer.items() if name != "layer"]
        first = row["first_token_that_differs"]
        table.add_row(
            row["name"], f"{row['max_logit_error']:.2e}", f"{row['mean_logit_error']:.2e}", f"{row['relative_error']:.1e}",
            f"{row['median_error']:.1e}", f"{row['bound']:.3g} of {row['bound_of']}", "none" if first is None else str(first),
            f"{max(errors, default=0.0):.1e}", "holds" if row["holds"] else "DOES NOT HOLD",
        )  # fmt: skip
    return table


def _plans(target: dict[str, Any]) -> Table:
    table = _table(f"{target['name']}: plans against ONNX Runtime", "engine", "pass", "worst output", "of largest", "")
    for row in target["plans"]:
        verdict = "holds" if row["holds"] else "DOES NOT HOLD"
        table.add_row(row["name"], row["pass"], row["output"], f"{row['relative_error']:.1e}", verdict)
    return table


def _latency(target: dict[str, Any]) -> Table:
    """Full depth and the variant with the fewest layers; the report has them all."""
    table = _table(
        f"{target['name']}: decode step, memory bandwidth {target['read_gb_per_s']:.1f} GB/s",
        "batch", "context", "prefill ms", "variant", "ms", "±", "of bound", "gain", "promised",
    )  # fmt: skip
    for cell in target["latency"]:
        for index, row in enumerate((cell["variants"][0], cell["variants"][-1])):
            where = (
                (str(cell["batch"]), str(cell["context"]), f"{cell['prefill_ms']['median']:.1f}") if not index else ("", "", "")
            )
            table.add_row(
                *where, row["name"], f"{row['ms']['median']:.2f}", _spread(row["ms"]), f"{row['share_of_bound']:.0%}",
                f"{row['gain']['median']:.2f}x", f"{row['promised_gain']:.2f}x",
            )  # fmt: skip
    return table


def _workloads(target: dict[str, Any]) -> Table:
    table = _table(f"{target['name']}: workload, schedule against full depth", "batch", "ttft ms", "of", "token ms p50",
                   "p90", "p99", "of", "tokens/s", "full depth", "gain decode", "end to end", "±")  # fmt: skip
    for load in target["workloads"]:
        own, full, gain = load["own"], load["full"], load["decode_gain"]
        times = own["token_ms"]
        tokens = [*(f"{times[key]:.2f}" for key in ("median", "p90", "p99")), str(times["n"])] if times else ["-"] * 4
        table.add_row(
            str(load["batch"]), f"{own['ttft_ms']['median']:.1f}", str(own["ttft_ms"]["n"]), *tokens,
            f"{own['tokens_per_s']['median']:.1f}", f"{full['tokens_per_s']['median']:.1f}",
            f"{gain['median']:.2f}x" if gain else "-", f"{load['end_to_end_gain']['median']:.2f}x",
            _spread(load["end_to_end_gain"]),
        )  # fmt: skip
    return table


def _quality(target: dict[str, Any]) -> Table:
    tokenizer = target["quality"][0]["bleu_tokenizer"]
    bleu = "BLEU" if tokenizer == DEFAULT_TOKENIZER else f"BLEU ({tokenizer})"
    title = f"{target['name']}: quality [95 % interval], answers cut off at --new-tokens"
    table = _table(title, "schedule", "fewer layers", "mean layers", bleu, "ROUGE-L", "BLEU lost against full depth", "cut off")
    for row in target["quality"]:
        table.add_row(
            row["name"], f"{row['schedule_speedup']:.2f}x", f"{row['mean_layers']:.2f}", _interval(row["bleu"]),
            _interval(row["rouge_l"]), _interval(row["bleu_loss"]) if "bleu_loss" in row else "",
            f"{row['cut_off']} of {len(row['texts'])}",
        )  # fmt: skip
    return table


def _baseline(baseline: dict[str, Any]) -> Iterator[Table | Text]:
    changed = [row for row in baseline["rows"] if row["verdict"] != "same"]
    title = f"against the baseline: {len(changed)} of {len(baseline['rows'])} differ significantly"
    # not as the table's title, which wraps at the table's width: a difference can be as long as a path
    yield Text("\n  DIFFERS: ".join([title, *baseline["differs"]]), style="table.title")
    if changed:
        table = _table(None, "", "old ms", "new ms", "ratio", "")
        for row in changed:
            table.add_row(row["name"], f"{row['old_ms']:.2f}", f"{row['new_ms']:.2f}", f"{row['ratio']:.2f}", row["verdict"])
        yield table


def _slo(rows: list[dict[str, Any]]) -> Table:
    table = _table("objectives", "", "target", "measured", "")
    for row in rows:
        table.add_row(row["slo"], row["target"], row["measured"], "holds" if row["holds"] else "DOES NOT HOLD")
    return table


def _spread(summary: dict[str, Any]) -> str:
    return f"{Summary(**summary).spread:.1%}" if summary["median"] else "-"


def _interval(value: dict[str, float]) -> str:
    return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
