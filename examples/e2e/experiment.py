"""The paper's table on the E2E data: quality and measured speed at 1x to 5x, from exported bundles through the runtime.

    python examples/e2e/experiment.py --models DIR --data testset_w_refs.csv --out FILE.json
    python examples/e2e/experiment.py --models DIR --data devset.csv --only skip --quantize int8

DIR holds what train.py wrote, one folder per model: `skip`, `full`, `kept12` ...; missing models are left out. An input that
occurs several times in the data counts once, with several references.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from data import SPAN, examples_of

from skipdecode.exporter.export import ExportRequest, export
from skipdecode.generate import Generator
from skipdecode.schedule_builders import ScheduleRequest
from skipdecode.validation.machine import machine_facts
from skipdecode.validation.quality import Example, answer, score
from skipdecode.validation.samples import Effort, Summary, interleave

DEPTH = 24
BATCH, NEW_TOKENS = 16, 72
TIMED_ROWS = (1, BATCH)
EFFORT = Effort(rounds=5, seconds=3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the table: a model's folder and how its layers are skipped."""

    title: str
    model: str
    name: str = "linear"  # "full": a truncated model, whose layers are all computed
    warmup_layers: int = 1
    speedups: tuple[int, ...] = (1, 2, 3, 4, 5)
    rival: str | None = None  # the model with all layers that was trained as long without skipping


def _truncated(title: str, longer: str = "") -> Iterator[Line]:
    for speedup, layers in ((2, 12), (3, 8), (4, 6), (5, 5)):
        yield Line(title=title, model=f"kept{layers}{longer}", name="full", speedups=(speedup,), rival=f"full{longer}")


LINES = (
    Line(title="trained with skipping, longer", model="skip_longer", rival="full_longer"),
    Line(title="trained without skipping, as long", model="full_longer"),
    *_truncated("truncated, trained as long", "_longer"),
    Line(title="trained with skipping", model="skip", rival="full"),
    Line(title="the same, `power` schedule", model="skip", name="power", speedups=(2, 3, 4, 5), rival="full"),
    Line(title="trained without skipping", model="full"),
    Line(title="early exit, trained for it", model="early_exit", warmup_layers=DEPTH, rival="full"),
    Line(title="0 warm-up layers, trained for it", model="warmup0", warmup_layers=0, rival="full"),
    Line(title="2 warm-up layers, trained for it", model="warmup2", warmup_layers=2, rival="full"),
    *_truncated("truncated"),
)


def main() -> None:
    options = _options()
    examples = examples_of(options.data)[: options.inputs]
    result = {
        "data": options.data.name, "inputs": len(examples), "quantize": options.quantize,
        "machine": machine_facts(("skipdecode", "onnxruntime", "torch", "sacrebleu", "rouge_score")),
        "rows": list(_rows(options, examples)),
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(result["rows"])))


def _rows(options: argparse.Namespace, examples: list[Example]) -> Iterator[dict[str, Any]]:
    """Measure one row after the other, printing a line for each."""
    with tempfile.TemporaryDirectory() as folder:
        cells = list(_cells(options))
        if not cells:
            raise SystemExit(f"{options.models}: holds none of the table's models; name the folder that train.py wrote them to")
        full_depth = _export(options, Path(folder), Line(title="", model=_whole_model(options, cells)), 1)
        full_texts: dict[str, list[str]] = {}  # model -> its texts at full depth
        for line, speedup in cells:
            is_full_depth = (line, speedup) == cells[0] and line.name != "full"
            generator = full_depth if is_full_depth else _export(options, Path(folder), line, speedup)
            answers = answer(generator, examples, generator.manifest.schedule, NEW_TOKENS)
            texts = answers.pop("texts")
            full_texts.setdefault(line.model, texts)
            if line.rival and line.rival not in full_texts and (options.models / line.rival).is_dir():
                rival = _export(options, Path(folder), Line(title="", model=line.rival), 1)
                full_texts[line.rival] = answer(rival, examples, rival.manifest.schedule, NEW_TOKENS)["texts"]
            # a truncated model has no full depth of its own
            baseline = full_texts.get(line.rival or "", full_texts[line.model]) if line.name == "full" else full_texts[line.model]
            row = {
                "title": line.title, "model": line.model, "schedule": line.name, "speedup": speedup, **answers,
                **score(texts, examples, baseline), "gain": {rows: _gain(full_depth, generator, rows) for rows in TIMED_ROWS},
                "example": texts[0],
            }  # fmt: skip
            if line.rival in full_texts:
                compared = row if baseline is full_texts[line.rival] else score(texts, examples, full_texts[line.rival])
                row["bleu_behind"] = compared["bleu_loss"]
            print(f"{line.title} {speedup}x: BLEU {row['bleu']['value']:.2f}, {row['gain'][1]['median']:.2f}x", flush=True)
            yield row


def _whole_model(options: argparse.Namespace, cells: list[tuple[Line, int]]) -> str:
    """The first model with all layers (a truncated model's rival), with whose decoding time all others are compared."""
    names = (line.rival if line.name == "full" else line.model for line, _ in cells)
    model = next((name for name in names if name and (options.models / name).is_dir()), None)
    if model is None:
        raise SystemExit(f"{options.models}: has truncated models alone; train the one that they are compared with, too: full")
    return model


def _cells(options: argparse.Namespace) -> Iterator[tuple[Line, int]]:
    for line in LINES:
        if (options.models / line.model).is_dir() and options.only in (None, line.model):
            for speedup in line.speedups:
                yield line, speedup


def _export(options: argparse.Namespace, folder: Path, line: Line, speedup: int) -> Generator:
    if speedup == 1 or line.name == "full":
        schedule = ScheduleRequest(name="full")
    else:
        schedule = ScheduleRequest(name=line.name, speedup=speedup, span=SPAN, warmup_layers=line.warmup_layers)
    request = ExportRequest(
        model=str(options.models / line.model), out=folder / f"{line.model}-{line.name}-{speedup}", schedule=schedule,
        max_batch=BATCH, quantize=options.quantize, slim=True,
    )  # fmt: skip
    if not request.out.exists():
        export(request)
    return Generator(request.out)


def _gain(full_depth: Generator, generator: Generator, rows: int) -> dict[str, float]:
    """How many times as fast as 24 layers it decodes SPAN tokens a row: the median of the rounds' ratios, with its interval."""
    prompts = [list(range(3, 35))] * rows

    def seconds(one: Generator) -> float:
        return one.generate(prompts, max_new_tokens=SPAN + 1, ignore_eos=True).timings.decode_s

    if generator is full_depth:
        return {"median": 1.0, "low": 1.0, "high": 1.0}
    times = interleave({"full": lambda: seconds(full_depth), "this": lambda: seconds(generator)}, EFFORT)
    ratios = Summary.of((np.array(times["full"]) / np.array(times["this"])).tolist())
    return {"median": ratios.median, "low": ratios.low, "high": ratios.high}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown lines: values with 95 % intervals, and the points lost against the model's own full depth and its rival's."""
    rivals = any("bleu_behind" in row for row in rows)
    columns = ["", "speedup asked", "mean layers", "BLEU", "lost", *(["behind"] if rivals else []), "ROUGE-L", "lost"]
    columns += ["decoding, batch 1", "batch 16"]
    lines = [_line(columns), "|---" * len(columns) + "|"]
    for row in rows:
        bleu, rouge = ([_cell(row[key]), _cell(row[f"{key}_loss"])] for key in ("bleu", "rouge_l"))
        behind = [_cell(row["bleu_behind"]) if "bleu_behind" in row else ""] if rivals else []
        gains = [f"{gain['median']:.2f}x" for gain in row["gain"].values()]
        lines.append(_line([row["title"], f"{row['speedup']}x", f"{row['mean_layers']:.1f}", *bleu, *behind, *rouge, *gains]))
    return lines


def _line(cells: list[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def _cell(value: dict[str, float]) -> str:
    return f"{value['value']:.1f} ({value['low']:.1f} .. {value['high']:.1f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of trained models")
    parser.add_argument("--data", type=Path, required=True, help="an E2E CSV file with references")
    parser.add_argument("--inputs", type=int, help="how many inputs to use (all)")
    parser.add_argument("--only", help="measure only the model in this folder")
    parser.add_argument("--quantize", choices=["none", "int8", "int4"], default="none")
    parser.add_argument("--out", type=Path, help="results as JSON")
    options = parser.parse_args()
    if not options.data.is_file():
        parser.error(f"--data: there is no file {options.data}")
    return options


if __name__ == "__main__":
    main()
