"""The paper's table on the E2E data: quality and measured speed at 1x to 5x, from exported bundles through the runtime.

    python examples/e2e/experiment.py --models DIR --data testset_w_refs.csv --out FILE.json
    python examples/e2e/experiment.py --models DIR --data devset.csv --only skip --quantize int8

DIR holds what train.py wrote, a folder a model: `skip`, `full`, `kept12` ...; models that are not there are left out. Inputs that
occur several times in the data are one input with several references.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from data import SPAN, prompt, read_pairs

from skipdecode.exporter.export import ExportRequest, export
from skipdecode.generate import Generator
from skipdecode.schedule_builders import ScheduleRequest
from skipdecode.validation.machine import machine_facts
from skipdecode.validation.quality import Example, answer, score
from skipdecode.validation.samples import Effort, Summary, interleave

DEPTH = 24
SPEEDUPS = (1, 2, 3, 4, 5)
BATCH, NEW_TOKENS = 16, 72
TIMED_ROWS = (1, BATCH)
EFFORT = Effort(rounds=5, seconds=3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the table: a model's folder and how its layers are skipped."""

    title: str
    model: str
    name: str = "linear"
    warmup_layers: int = 1


LINES = (
    Line(title="trained with skipping", model="skip"),
    Line(title="the same, `power` schedule", model="skip", name="power"),
    Line(title="trained without skipping", model="full"),
    Line(title="early exit, trained for it", model="early_exit", warmup_layers=DEPTH),
    Line(title="0 warm-up layers, trained for it", model="warmup0", warmup_layers=0),
    Line(title="2 warm-up layers, trained for it", model="warmup2", warmup_layers=2),
)
TRUNCATED = {2: "kept12", 3: "kept8", 4: "kept6", 5: "kept5"}


def main() -> None:
    options = _options()
    references: dict[str, list[str]] = defaultdict(list)
    for attributes, text in read_pairs(options.data):
        references[attributes].append(text)
    examples = [Example(prompt=prompt(key), references=tuple(texts)) for key, texts in references.items()][: options.inputs]
    result = {
        "data": options.data.name, "inputs": len(examples), "quantize": options.quantize,
        "machine": machine_facts(("skipdecode", "onnxruntime", "torch", "sacrebleu", "rouge_score")),
        "rows": list(_rows(options, examples)),
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(result["rows"])))


def _rows(options: argparse.Namespace, examples: list[Example]) -> Iterator[dict[str, Any]]:
    """One measured row after the other, each told as it comes."""
    with tempfile.TemporaryDirectory() as folder:
        first = options.only or "skip"
        full_depth = _export(options, Path(folder), Line(title="", model=first), 1)
        baselines: dict[str, list[str]] = {}
        for line, speedup in _cells(options):
            generator = full_depth if (line.model, speedup) == (first, 1) else _export(options, Path(folder), line, speedup)
            said = answer(generator, examples, generator.manifest.schedule, NEW_TOKENS)
            texts = said.pop("texts")
            baselines.setdefault(line.model, texts)
            # a truncated model has no full depth: it is compared with the model that was trained as long without truncating
            against = baselines["full"] if line.title == "truncated" and "full" in baselines else baselines[line.model]
            row = {
                "title": line.title, "model": line.model, "schedule": line.name, "speedup": speedup, **said,
                **score(texts, examples, against), "gain": {rows: _gain(full_depth, generator, rows) for rows in TIMED_ROWS},
                "example": texts[0],
            }  # fmt: skip
            print(f"{line.title} {speedup}x: BLEU {row['bleu']['value']:.2f}, {row['gain'][1]['median']:.2f}x", flush=True)
            yield row


def _cells(options: argparse.Namespace) -> Iterator[tuple[Line, int]]:
    for line in LINES:
        if (options.models / line.model).is_dir() and options.only in (None, line.model):
            for speedup in SPEEDUPS if line.name == "linear" else SPEEDUPS[1:]:
                yield line, speedup
    for speedup, model in TRUNCATED.items():
        if (options.models / model).is_dir() and options.only is None:
            yield Line(title="truncated", model=model), speedup


def _export(options: argparse.Namespace, folder: Path, line: Line, speedup: int) -> Generator:
    if speedup == 1 or line.title == "truncated":
        schedule = ScheduleRequest(name="full")
    else:
        schedule = ScheduleRequest(name=line.name, speedup=speedup, span=SPAN, warmup_layers=line.warmup_layers)
    request = ExportRequest(
        model=str(options.models / line.model), out=folder / f"{line.model}-{line.name}-{speedup}", schedule=schedule,
        max_batch=BATCH, quantize=options.quantize, slim=True,
    )  # fmt: skip
    export(request)
    return Generator(request.out)


def _gain(full_depth: Generator, generator: Generator, rows: int) -> dict[str, float]:
    """How many times faster than 24 layers it decodes SPAN tokens a row: the median of the rounds' ratios, with its interval."""
    prompts = [list(range(3, 35))] * rows

    def seconds(one: Generator) -> float:
        return one.generate(prompts, max_new_tokens=SPAN + 1, ignore_eos=True).timings.decode_s

    if generator is full_depth:
        return {"median": 1.0, "low": 1.0, "high": 1.0}
    times = interleave({"full": lambda: seconds(full_depth), "this": lambda: seconds(generator)}, EFFORT)
    ratios = Summary.of((np.array(times["full"]) / np.array(times["this"])).tolist())
    return {"median": ratios.median, "low": ratios.low, "high": ratios.high}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown; a value with its 95 % interval, and the points lost against the model's own full depth."""
    lines = [
        "| | speedup asked | mean layers | BLEU | lost | ROUGE-L | lost | decoding, batch 1 | batch 16 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        quality = [f"{_cell(row[key])} | {_cell(row[f'{key}_loss'])}" for key in ("bleu", "rouge_l")]
        gains = [f"{gain['median']:.2f}x" for gain in row["gain"].values()]
        lines.append(
            f"| {row['title']} | {row['speedup']}x | {row['mean_layers']:.1f} | {' | '.join(quality)} | {' | '.join(gains)} |"
        )
    return lines


def _cell(value: dict[str, float]) -> str:
    return f"{value['value']:.1f} ({value['low']:.1f} .. {value['high']:.1f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of trained models")
    parser.add_argument("--data", type=Path, required=True, help="an E2E CSV file with references")
    parser.add_argument("--inputs", type=int, help="only the first ones")
    parser.add_argument("--only", help="one model's folder")
    parser.add_argument("--quantize", choices=["none", "int8", "int4"], default="none")
    parser.add_argument("--out", type=Path, help="results as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
