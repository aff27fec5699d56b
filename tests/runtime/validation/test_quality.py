"""Scores with intervals, and schedules at other speedups on the bundle's own variants."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import sacrebleu
from rouge_score.tokenizers import DefaultTokenizer

from skipdecode import manifest as manifests
from skipdecode.errors import CapacityError
from skipdecode.schedule import Anchor, Schedule
from skipdecode.schedule_builders import ScheduleRequest, build_schedule
from skipdecode.validation import quality
from skipdecode.validation.quality import Example, check_examples, read_examples, schedule_for, score
from tests.models import LAYERS
from tests.zoo import Zoo

EXAMPLES = [
    Example(prompt="a", references=("the cat sat on the mat", "a cat sat on a mat")),
    Example(prompt="b", references=("dogs bark loudly at the moon tonight",)),
    Example(prompt="c", references=("rain falls mainly on the plain", "on the plain falls rain", "rain")),
]
SAID = ["the cat sat on a mat today", "dogs bark at the moon tonight again", "the rain falls on the plain"]


def test_bleu_is_sacrebleus_for_examples_with_any_number_of_references() -> None:
    columns = [[e.references[i] if i < len(e.references) else None for e in EXAMPLES] for i in range(3)]
    found = score(SAID, EXAMPLES)
    assert found["bleu"]["value"] == pytest.approx(sacrebleu.corpus_bleu(SAID, columns).score, abs=1e-9)
    assert found["bleu"]["low"] <= found["bleu"]["value"] <= found["bleu"]["high"]
    assert found["rouge_l"]["low"] <= found["rouge_l"]["value"] <= found["rouge_l"]["high"]


def test_bleu_without_a_match_of_some_length_is_smoothed_as_sacrebleus_is() -> None:
    said, examples = ["the cat is on a mat here"], [Example(prompt="a", references=("the cat was on a mat there",))]
    assert score(said, examples)["bleu"]["value"] == pytest.approx(
        sacrebleu.corpus_bleu(said, [["the cat was on a mat there"]]).score
    )
    assert score(said, examples)["bleu"]["value"] > 30


def test_the_best_reference_counts_for_rouge() -> None:
    assert score([e.references[-1] for e in EXAMPLES], EXAMPLES)["rouge_l"]["value"] == pytest.approx(100)


def test_rouge_counts_extra_words_and_missing_ones() -> None:
    twice = " ".join(["dogs bark loudly at the moon tonight"] * 2)
    assert score([twice], EXAMPLES[1:2])["rouge_l"]["value"] == pytest.approx(200 / 3)
    assert score(["dogs bark loudly"], EXAMPLES[1:2])["rouge_l"]["value"] == pytest.approx(60)


@pytest.mark.parametrize(
    ("text", "near", "tokenizer"),
    [
        ("The Mill is a café near 北京.", "The Mill is a pub near 北京.", "13a"),
        ("Мельница это кофейня возле реки.", "Мельница это кофейня возле моря.", "13a"),
        ("यह इतालवी भोजन परोसता है और सस्ता है।", "यह इतालवी भोजन परोसता है और महँगा है।", "13a"),
        ("磨坊是河边的一家咖啡馆 The Mill。", "磨坊是河边的一家咖啡店 The Mill。", "zh"),
        ("工場は川のそばにあるカフェです。", "工場は海のそばにあるカフェです。", "char"),
        ("ﾐｽﾞｳﾐﾉﾁｶｸﾆｱﾙｶﾌｪﾃﾞｽ｡", "ﾐｽﾞｳﾐﾉﾁｶｸﾆｱﾙﾐｾﾃﾞｽ｡", "char"),
        ("โรงสีเป็นร้านกาแฟใกล้แม่น้ำ", "โรงสีเป็นร้านกาแฟใกล้ทะเล", "char"),
    ],
)
def test_the_answer_scores_100_in_every_script_and_a_similar_one_less(text: str, near: str, tokenizer: str) -> None:
    examples = [Example(prompt="a", references=(text,))]
    exact, other = score([text], examples), score([near], examples, [text])
    assert exact["bleu_tokenizer"] == other["bleu_tokenizer"] == tokenizer
    for name in ("bleu", "rouge_l"):
        assert exact[name]["value"] == pytest.approx(100)
        assert 20 < other[name]["value"] < 99
        assert other[f"{name}_loss"]["value"] > 1


def test_the_references_choose_how_bleu_splits_text_and_the_answers_do_not() -> None:
    english = [Example(prompt="a", references=("the cat sat on the mat",))]
    assert score(["磨坊是河边的一家咖啡馆。"], english)["bleu_tokenizer"] == "13a"
    chinese = [Example(prompt="b", references=("磨坊是河边的一家咖啡馆。",))]
    assert score(["the cat sat on the mat"], chinese)["bleu_tokenizer"] == "zh"


def test_rouge_splits_ascii_into_the_same_words_as_rouge_score() -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(chr(rng.randrange(128)) for _ in range(80))
        assert quality._words(text) == DefaultTokenizer().tokenize(text)


def test_combining_marks_belong_to_their_letters_and_do_not_end_words() -> None:
    assert quality._words("Cafe\u0301, का की! x_y") == ["cafe\u0301", "का", "की", "x", "y"]


def test_an_interval_is_where_95_of_100_resamples_lie() -> None:
    """Of three examples, one is drawn three times in 1 of 27 resamples, and only the other two are drawn in 8 of 27."""
    said = [EXAMPLES[0].references[0], "x", "x"]
    assert score(said, EXAMPLES)["rouge_l"] == pytest.approx({"value": 100 / 3, "low": 0, "high": 100})
    wholly = [example.references[0] for example in EXAMPLES]
    assert score(said, EXAMPLES, wholly)["rouge_l_loss"] == pytest.approx({"value": 200 / 3, "low": 0, "high": 100})
    assert quality._interval(0.0, range(1001)) == {"value": 0, "low": 25, "high": 975}


def test_equal_answers_lose_nothing_and_worse_ones_do() -> None:
    best = [e.references[0] for e in EXAMPLES]
    same = score(best, EXAMPLES, best)["bleu_loss"]
    assert (same["value"], same["low"], same["high"]) == (0, 0, 0)
    for loss in (score(SAID, EXAMPLES, best)[name] for name in ("bleu_loss", "rouge_l_loss")):
        assert 0 < loss["low"] <= loss["value"] <= loss["high"]


def test_an_example_may_fill_the_bundles_length(zoo: Zoo) -> None:
    manifest = manifests.read(zoo.bundle("opt"))
    ids = [[1] * (manifest.limits.max_length - 8)]
    generator = SimpleNamespace(manifest=manifest, encode=lambda prompts: ids)
    check_examples(EXAMPLES[:1], generator, 8, Path("dev.jsonl"))
    with pytest.raises(CapacityError, match=r"dev.jsonl, example 1: its 40 tokens and 9 new ones exceed the bundle's 48"):
        check_examples(EXAMPLES[:1], generator, 9, Path("dev.jsonl"))


def test_another_speedup_is_rounded_up_to_the_variants_that_the_bundle_has(zoo: Zoo) -> None:
    manifest = manifests.read(zoo.bundle("opt"))
    counts = {variant.num_layers for variant in manifest.variants}
    schedule = schedule_for(manifest, 2)
    assert set(schedule.layers) <= counts
    assert schedule.mean_layers >= LAYERS / 2
    assert schedule_for(manifest, 1).layers == (LAYERS,)


@pytest.mark.parametrize(("name", "kind"), [("power", "power"), ("step", "step"), ("linear", "linear"), ("table", "linear")])
def test_another_speedup_has_the_bundles_own_kind_of_schedule(name: str, kind: str, zoo: Zoo) -> None:
    made = manifests.read(zoo.bundle("opt"))
    every = tuple(dataclasses.replace(made.variants[0], name=f"v{count}", num_layers=count) for count in range(2, LAYERS + 1))
    layers = tuple([LAYERS] * 6 + [3] * 6)
    own = Schedule(name=name, num_layers=LAYERS, warmup_layers=2, layers=layers, anchor=Anchor.ABSOLUTE)
    manifest = SimpleNamespace(schedule=own, variants=every)
    wanted = build_schedule(ScheduleRequest(name=kind, speedup=1.5, span=12, warmup_layers=2, anchor=Anchor.ABSOLUTE), LAYERS)
    found = schedule_for(manifest, 1.5)  # type: ignore[arg-type]
    assert found == dataclasses.replace(wanted, name="table")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an example"),
        ('{"prompt": "x"}', "is not an example"),
        ('{"prompt": "x", "references": []}', "is not an example"),
        ('{"prompt": "x", "references": "y"}', "is not an example"),
        ('{"prompt": "", "references": ["y"]}', "is not an example"),
        ('{"prompt": 3, "references": ["y"]}', "is not an example"),
        ('{"prompt": "a\\ud83d", "references": ["y"]}', "its prompt holds half of a character"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"prompt": "x", "references": ["y"]}) + "\n\n" + line + "\n")
    with pytest.raises(CapacityError, match=rf"eval\.jsonl, line 3: {says}") as caught:
        read_examples(path)
    assert "\n" not in str(caught.value)


def test_lines_end_where_json_lines_do(tmp_path: Path) -> None:
    """Strings may hold Unicode's other line ends; Windows writes a byte order mark first and two characters at each line end."""
    path = tmp_path / "eval.jsonl"
    lines = ('{"prompt": "a\u2028b\x85c", "references": ["d"]}', '{"prompt": "e", "references": ["f"]}')
    path.write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    assert [example.prompt for example in read_examples(path)] == ["a\u2028b\x85c", "e"]


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="cannot be read"):
        read_examples(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(CapacityError, match="is empty"):
        read_examples(tmp_path / "empty.jsonl")
