"""What do quantised weights cost in quality? Each kind against fp32, on the shipped model, decoding greedily.

Compares texts and BLEU of all inputs at full depth and at 2x, and logits and next tokens along fp32's own tokens at full depth.

examples:
  quantized_quality.py                              (the shipped sample: 100 inputs)
  quantized_quality.py --data devset.csv            (E2E's development set)
  quantized_quality.py --model ./in-gptq            (the same model, already quantised)
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from skipdecode.exporter.export import ExportRequest, export
from skipdecode.generate import Generator
from skipdecode.schedule import full_depth
from skipdecode.schedule_builders import ScheduleRequest
from skipdecode.validation.quality import Example, answer, score

EXAMPLE = Path(__file__).parents[1] / "examples" / "e2e"
sys.path.insert(0, str(EXAMPLE))
from data import examples_of  # noqa: E402

KINDS = (  # weights, method, inputs that share one scale
    ("none", "rtn", 32), ("int8", "rtn", 32), ("int8", "k-quant", 32), ("int8", "rtn", 128),
    ("int4", "rtn", 32), ("int4", "k-quant", 32), ("int4", "rtn", 64), ("int4", "rtn", 128), ("int4", "k-quant", 128),
)  # fmt: skip
BATCH, NEW_TOKENS, COMPARED_INPUTS = 16, 72, 100  # rows at a time, tokens at most, inputs whose logits are compared


def main() -> int:
    """Print one line per kind, then all results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=EXAMPLE / "sample.csv", help="E2E's CSV format (the shipped sample)")
    parser.add_argument("--model", type=Path, default=EXAMPLE / "model", help="a checkpoint folder (the shipped model)")
    options = parser.parse_args()
    rows = measure(options.model, examples_of(options.data), KINDS)
    print(json.dumps(rows))
    return 0


def measure(model: Path, examples: list[Example], kinds: Sequence[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """One row per kind of weights, printed when it is done; the others are compared with the first kind."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        exact = _generator(model, Path(temporary), *kinds[0])
        for quantize, method, block in kinds:
            generator = exact if quantize == "none" else _generator(model, Path(temporary), quantize, method, block)
            texts = answer(generator, examples, full_depth(generator.manifest.model.num_layers), NEW_TOKENS)["texts"]
            skipped = answer(generator, examples, generator.manifest.schedule, NEW_TOKENS)["texts"]
            baseline = texts if not rows else rows[0]["texts"]
            rows.append({
                "quantize": quantize, "method": method, "block": block, "texts": texts,
                "same_texts": sum(one == other for one, other in zip(texts, baseline, strict=True)),
                **_compare_logits(exact, generator, [each.prompt for each in examples[:COMPARED_INPUTS]]),
                "bleu": score(texts, examples)["bleu"], "bleu_2x": score(skipped, examples)["bleu"],
            })  # fmt: skip
            row = rows[-1]
            print(
                f"{quantize:5}{method:8}{block:4} same texts {row['same_texts']:4} of {len(examples)}, same next token "
                f"{row['same_next_token']:.1%}, logits {row['logit_error']:.4f}, BLEU {row['bleu']['value']:.2f}, "
                f"at 2x {row['bleu_2x']['value']:.2f}", flush=True,
            )  # fmt: skip
    return [{name: value for name, value in row.items() if name != "texts"} for row in rows]


def _generator(model: Path, folder: Path, quantize: str, method: str, block: int) -> Generator:
    out = folder / f"{quantize}-{method}-{block}"
    schedule = ScheduleRequest(name="linear", speedup=2, span=48)
    export(
        ExportRequest(
            model=str(model), out=out, schedule=schedule, quantize=quantize, quantize_method=method,
            quantize_block=block, max_batch=BATCH, max_length=256, slim=True,
        )
    )  # fmt: skip
    return Generator(out)


def _compare_logits(exact: Generator, generator: Generator, prompts: list[str]) -> dict[str, float]:
    """Feed fp32's greedy tokens to both; returns how often the next token is the same and the relative error of the logits."""
    same, squared, norm, count = 0, 0.0, 0.0, 0
    schedule = full_depth(exact.manifest.model.num_layers)
    for ids in exact.encode(prompts):
        tokens = exact.generate([ids], max_new_tokens=NEW_TOKENS, schedule="full").sequences[0].token_ids
        for theirs, ours in zip(_logits(exact, ids, tokens, schedule), _logits(generator, ids, tokens, schedule), strict=True):
            same, count = same + int(theirs.argmax() == ours.argmax()), count + 1
            squared, norm = squared + float(np.square(theirs - ours).sum()), norm + float(np.square(theirs).sum())
    return {"same_next_token": same / count, "logit_error": (squared / norm) ** 0.5}


def _logits(generator: Generator, prompt: list[int], tokens: tuple[int, ...], schedule: Any) -> Iterator[Any]:
    decoder = generator.decoder([len(prompt)], len(tokens), schedule)
    decoder.prefill([prompt])
    yield decoder.logits[0].copy()
    for token in tokens[:-1]:
        decoder.decode_step(np.array([token]))
        yield decoder.logits[0].copy()


if __name__ == "__main__":
    sys.exit(main())
