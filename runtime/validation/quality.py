"""How good the text is at several speedups: BLEU (sacrebleu) and ROUGE-L (rouge-score), with bootstrap confidence intervals."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from skipdecode.errors import CapacityError
from skipdecode.generate import Generator
from skipdecode.generation import Row, check_rows
from skipdecode.manifest import Manifest
from skipdecode.schedule import Schedule, full_depth
from skipdecode.schedule_builders import ScheduleRequest, build_schedule
from skipdecode.validation.workload import read_jsonl

DEFAULT_TOKENIZER = "13a"  # sacrebleu's own
_RESAMPLES = 1000

# letters of scripts without spaces between words: Han only, and Han with Thai, Lao, Burmese, Khmer and kana (half-width, too)
_HAN = re.compile("[\u3005-\u3007\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_UNSPACED = re.compile(f"{_HAN.pattern}|[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\uff66-\uff9f]")

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt with its acceptable answers."""

    prompt: str
    references: tuple[str, ...]  # one or more


def read_examples(path: Path) -> list[Example]:
    """Read a JSONL file with `{"prompt": "...", "references": ["...", ...]}` on each line.

    Raises:
        CapacityError: unreadable, empty, or a malformed line, which is named.
    """
    examples = []
    for where, data in read_jsonl(path):
        prompt, references = (data.get("prompt"), data.get("references")) if isinstance(data, dict) else (None, None)
        texts = [prompt, *references] if isinstance(references, list) and references else []
        if not texts or not prompt or not all(isinstance(text, str) for text in texts):
            raise CapacityError("is not an example", 'write {"prompt": "...", "references": ["...", "..."]}', where=where)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise CapacityError("its prompt holds half of a character", "write both of its \\u escapes", where=where) from error
        examples.append(Example(prompt=prompt, references=tuple(texts[1:])))
    return examples


def schedule_for(manifest: Manifest, speedup: float) -> Schedule:
    """The bundle's kind of schedule (linear if that is full or a table) at another speedup.

    Layer counts are rounded up to variants that the bundle has.

    Raises:
        ScheduleError: the model cannot reach the speedup.
    """
    own = manifest.schedule
    if speedup == 1:
        return full_depth(own.num_layers)
    kind = own.name if own.name in ("power", "step") else "linear"
    request = ScheduleRequest(name=kind, speedup=speedup, warmup_layers=own.warmup_layers, span=own.span, anchor=own.anchor)
    wanted = build_schedule(request, own.num_layers)
    counts = sorted(variant.num_layers for variant in manifest.variants)
    rounded = tuple(next(count for count in counts if count >= k) for k in wanted.layers)
    return dataclasses.replace(wanted, name="table", layers=rounded)


def check_examples(examples: Sequence[Example], generator: Generator, new_tokens: int, where: Path) -> None:
    """Raise CapacityError if the bundle cannot run an example, such as one that is too long, or if it has no tokenizer."""
    limit = generator.manifest.limits.max_length
    for number, ids in enumerate(generator.encode([example.prompt for example in examples]), 1):
        if len(ids) + new_tokens > limit:
            raise CapacityError(
                f"its {len(ids)} tokens and {new_tokens} new ones exceed the bundle's {limit}",
                "shorten it, lower --new-tokens, or export with a larger --max-length",
                where=f"{where}, example {number}",
            )
        try:
            check_rows([Row(prompt_ids=ids)], new_tokens, generator.manifest)
        except CapacityError as error:
            raise CapacityError(error.what, error.remedy, where=f"{where}, example {number}'s prompt") from error


def answer(generator: Generator, examples: Sequence[Example], schedule: Schedule, new_tokens: int) -> dict[str, Any]:
    """Answer all examples greedily, in batches.

    Returns:
        `texts`; `cut_off`, how many of them end at `new_tokens`, which lowers their scores; `mean_layers` of a decode step;
        `schedule_speedup` (L over the schedule's mean); `decode_s`.
    """
    batch = generator.manifest.limits.max_batch
    # prompts of similar length share a batch, so that the batch as a whole ends early
    order = sorted(range(len(examples)), key=lambda index: (len(examples[index].prompt), index))
    texts, seconds, cut_off = [""] * len(examples), 0.0, 0
    layers: list[int] = []
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        result = generator.generate([examples[i].prompt for i in chosen], max_new_tokens=new_tokens, schedule=schedule)
        for index, row in zip(chosen, result.sequences, strict=True):
            texts[index] = " ".join((row.text or "").split())
        cut_off += sum(row.finish_reason == "length" for row in result.sequences)
        layers += result.layers
        seconds += result.timings.decode_s
    return {
        "texts": texts,
        "cut_off": cut_off,
        "mean_layers": sum(layers) / len(layers) if layers else float(schedule.num_layers),
        "schedule_speedup": schedule.num_layers / schedule.mean_layers,
        "decode_s": seconds,
    }


def score(texts: Sequence[str], examples: Sequence[Example], baseline: Sequence[str] | None = None) -> dict[str, Any]:
    """BLEU (0-100) and ROUGE-L F1 (0-100, by the best reference) with 95 % intervals, and their loss against `baseline`'s texts.

    The intervals of the losses come from paired resamples: the same examples are drawn for both. `bleu_tokenizer` names the
    tokenizer of sacrebleu that split the texts into words. Only BLEU scores with the same one are comparable.
    """
    tokenizer = _bleu_tokenizer(examples)
    draws = np.random.default_rng(12345).integers(0, len(texts), (_RESAMPLES, len(texts)))
    scores = {"bleu": _bleu(texts, examples, tokenizer, draws), "rouge_l": _rouge_l(texts, examples, draws)}
    intervals = {name: _interval(value, resampled) for name, (value, resampled) in scores.items()}
    result: dict[str, Any] = {**intervals, "bleu_tokenizer": tokenizer}
    if baseline is not None:
        baseline_scores = {"bleu": _bleu(baseline, examples, tokenizer, draws), "rouge_l": _rouge_l(baseline, examples, draws)}
        for name, (value, resampled) in scores.items():
            baseline_value, baseline_resampled = baseline_scores[name]
            result[f"{name}_loss"] = _interval(baseline_value - value, baseline_resampled - resampled)
    return result


def _words(text: str) -> list[str]:
    """Lower-case runs of letters, marks and digits; single letters of scripts without spaces. ASCII splits as in rouge-score."""
    letters = "".join(char if unicodedata.category(char)[0] in "LMN" else " " for char in text.lower())
    return _UNSPACED.sub(r" \g<0> ", letters).split()


def _bleu_tokenizer(examples: Sequence[Example]) -> str:
    """Choose by the references' script: sacrebleu's default, 13a, takes a sentence without spaces for one word."""
    words = [word for example in examples for reference in example.references for word in _words(reference)]
    unspaced = [word for word in words if _UNSPACED.match(word)]
    if 2 * len(unspaced) <= len(words):
        return DEFAULT_TOKENIZER
    han = sum(_HAN.match(word) is not None for word in unspaced)
    return "zh" if 10 * han >= 9 * len(unspaced) else "char"  # zh does not split runs of kana or Thai


def _bleu(texts: Sequence[str], examples: Sequence[Example], tokenizer: str, draws: Array) -> tuple[float, Array]:
    from sacrebleu.metrics.bleu import BLEU

    # only the counts of the sentences are used: they add up to the corpus's
    metric = BLEU(effective_order=True, tokenize=tokenizer)
    sentences = [metric.sentence_score(text, example.references) for text, example in zip(texts, examples, strict=True)]
    statistics = np.array([[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in sentences])  # [N, 10]

    def corpus(sums: Array) -> float:
        counts = sums.tolist()
        return float(BLEU.compute_bleu(counts[:4], counts[4:8], counts[8], counts[9], smooth_method="exp").score)

    return corpus(statistics.sum(axis=0)), np.array([corpus(statistics[draw].sum(axis=0)) for draw in draws])


def _rouge_l(texts: Sequence[str], examples: Sequence[Example], draws: Array) -> tuple[float, Array]:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], tokenizer=SimpleNamespace(tokenize=_words))  # its own keeps only a-z and 0-9
    each = np.array([
        100 * scorer.score_multi(example.references, text)["rougeL"].fmeasure
        for text, example in zip(texts, examples, strict=True)
    ])  # fmt: skip
    return float(each.mean()), each[draws].mean(axis=1)


def _interval(value: float, resampled: Iterable[float]) -> dict[str, float]:
    low, high = np.percentile(np.fromiter(resampled, dtype=np.float64), [2.5, 97.5])
    return {"value": value, "low": float(low), "high": float(high)}
