"""BLEU of the shipped model at several speedups and weight formats, from exported bundles through the runtime.

    python examples/e2e/evaluate.py --data FILE.csv [--inputs N] [--quantize int8]

FILE is an E2E CSV file; inputs that occur several times are one input with several references.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path

import sacrebleu
from data import prompt, read_pairs

import skipdecode
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule_builders import ScheduleRequest

MODEL = Path(__file__).parent / "model"
SPAN, NEW_TOKENS, BATCH = 48, 72, 16
SPEEDUPS = (1.0, 2.0, 3.0, 4.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--quantize", choices=["none", "int8", "int4"], default="none")
    options = parser.parse_args()
    references: dict[str, list[str]] = defaultdict(list)
    for attributes, text in read_pairs(options.data):
        references[attributes].append(text)
    asked = list(references)[: options.inputs]
    for speedup in SPEEDUPS:
        row = {"speedup": speedup, "quantize": options.quantize, "inputs": len(asked)}
        print(json.dumps({**row, **_score(asked, references, speedup, options.quantize)}), flush=True)


def _score(asked: list[str], references: dict[str, list[str]], speedup: float, quantize: str) -> dict[str, float]:
    """BLEU (sacrebleu), mean layers a decode step, and seconds of decoding."""
    with tempfile.TemporaryDirectory() as folder:
        schedule = ScheduleRequest(name="full") if speedup == 1 else ScheduleRequest(speedup=speedup, span=SPAN)
        bundle = Path(folder) / "bundle"
        export(ExportRequest(model=str(MODEL), out=bundle, schedule=schedule, quantize=quantize, slim=True))
        model = skipdecode.load(bundle)
        said: list[str] = []
        layers: list[int] = []
        seconds = 0.0
        for start in range(0, len(asked), BATCH):
            result = model.generate([prompt(text) for text in asked[start : start + BATCH]], max_new_tokens=NEW_TOKENS)
            said += [(row.text or "").strip() for row in result.sequences]
            layers += result.layers
            seconds += result.timings.decode_s
    most = max(len(references[text]) for text in asked)
    columns = [[references[text][i] if i < len(references[text]) else None for text in asked] for i in range(most)]
    bleu = sacrebleu.corpus_bleu(said, columns)
    return {"bleu": round(bleu.score, 2), "mean_layers": round(sum(layers) / len(layers), 2), "decode_s": round(seconds, 2)}


if __name__ == "__main__":
    main()
