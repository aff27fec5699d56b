"""What block-quantised weights cost the example's model, on the part of the E2E data that comes with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import sacrebleu

import skipdecode
from skipdecode.exporter.export import ExportRequest, export

EXAMPLE = Path(__file__).parents[2] / "examples" / "e2e"


@pytest.fixture(scope="module")
def asked() -> dict[str, list[str]]:
    """Prompt -> references."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        from data import examples_of
    finally:
        sys.path.remove(str(EXAMPLE))
    return {example.prompt: [*example.references] for example in examples_of(EXAMPLE / "sample.csv")}


def _texts(quantize: str, folder: Path, prompts: list[str]) -> list[str]:
    export(ExportRequest(model=str(EXAMPLE / "model"), out=folder / quantize, quantize=quantize, max_length=256))
    model = skipdecode.load(folder / quantize)
    batches = [prompts[start : start + 16] for start in range(0, len(prompts), 16)]
    results = [model.generate(batch, max_new_tokens=72, schedule="full") for batch in batches]
    return [str(row.text).strip() for result in results for row in result.sequences]


def test_int8_gives_nearly_always_the_same_text_and_loses_at_most_half_a_point_of_bleu(
    asked: dict[str, list[str]], tmp_path: Path
) -> None:
    prompts = list(asked)[:100]
    exact, narrow = (_texts(quantize, tmp_path, prompts) for quantize in ("none", "int8"))
    assert sum(one == other for one, other in zip(exact, narrow, strict=True)) >= 0.85 * len(prompts)
    most = max(len(asked[text]) for text in prompts)
    references = [[asked[text][i] if i < len(asked[text]) else None for text in prompts] for i in range(most)]
    scores = [sacrebleu.corpus_bleu(texts, references).score for texts in (exact, narrow)]  # type: ignore[arg-type]
    assert scores[1] >= scores[0] - 0.5, scores
