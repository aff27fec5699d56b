"""A loaded bundle under good and bad requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import skipdecode
from skipdecode.decoder import Decoder
from skipdecode.errors import CapacityError, ScheduleError
from skipdecode.generate import Generator
from skipdecode.generation import Row, Step
from skipdecode.model import LayerGroup
from skipdecode.sampling import Sampling
from skipdecode.schedule import Schedule, full_depth
from tests.models import LAYERS, MAX_LENGTH, VOCABULARY
from tests.zoo import Zoo

PROMPT = [5, 6, 7, 20]


@pytest.fixture(scope="module")
def generator(zoo: Zoo) -> Generator:
    return skipdecode.load(zoo.bundle("llama"))


@pytest.mark.parametrize(
    ("prompts", "new", "says"),
    [
        ([], 4, "no prompt"),
        ([[5], []], 4, "prompt 1: is empty"),
        (np.array([5.5]), 4, "prompt 0: .* is neither text nor token ids"),
        ([[5], 6], 4, "prompt 1: 6 is neither text nor token ids; give a text or a list of whole numbers"),
        ([[5], [6, "a"]], 4, "prompt 1: .* is neither text nor token ids"),
        ([[1.5]], 4, "prompt 0: .1.5. is neither text nor token ids"),
        (None, 4, "None is not a prompt; give a text or a list of whole numbers"),
        ({"a": 5}, 4, "is not a prompt"),
        ([VOCABULARY], 4, f"give ids from 0 to {VOCABULARY - 1}"),
        ([-1], 4, "outside the vocabulary"),
        ([5] * 45, 4, f"exceed the bundle's {MAX_LENGTH}"),
        ([[5]] * 5, 4, "the bundle takes 4"),
        (b"text", 4, "prompt 0: b'text' is neither text nor token ids"),
        ([[5], b"text"], 4, "prompt 1: b'text' is neither text nor token ids"),
        (np.array(["a", "b"]), 4, "no tokenizer"),
        ([5] * 40, np.int8(100), f"40 tokens and 100 new ones exceed the bundle's {MAX_LENGTH}"),
        ([5], 0, "choose 1 or more"),
        ([5], None, "None is not a positive count"),
        ([5], 2.5, "2.5 is not a positive count"),
        ("text", 4, "no tokenizer"),
    ],
)
def test_a_bad_request_is_reported_in_one_line_and_the_generator_stays_usable(
    generator: Generator, prompts: object, new: Any, says: str
) -> None:
    before = generator.generate(PROMPT, max_new_tokens=6).sequences
    with pytest.raises(CapacityError, match=says) as caught:
        generator.generate(prompts, max_new_tokens=new)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert generator.generate(PROMPT, max_new_tokens=6).sequences == before


def test_a_row_may_fill_the_bundles_length_and_64_tokens_are_the_default(generator: Generator) -> None:
    (row,) = generator.generate([5] * (MAX_LENGTH - 3), max_new_tokens=3, ignore_eos=True).sequences
    assert len(row.token_ids) == 3
    with pytest.raises(CapacityError, match=f"4 tokens and 64 new ones exceed the bundle's {MAX_LENGTH}"):
        generator.generate(PROMPT)


def test_without_a_tokenizer_a_row_has_no_text(generator: Generator) -> None:
    assert generator.tokenizer is None
    assert generator.generate(PROMPT, max_new_tokens=2).sequences[0].text is None


def test_ids_may_be_numpy_integers(generator: Generator) -> None:
    wanted = generator.generate(PROMPT, max_new_tokens=4).sequences
    assert generator.generate([np.int64(PROMPT[0]), *PROMPT[1:]], max_new_tokens=4).sequences == wanted
    assert generator.generate(np.array([PROMPT]), max_new_tokens=4).sequences == wanted  # type: ignore[arg-type]
    assert generator.generate(np.array(PROMPT), max_new_tokens=4).sequences == wanted  # type: ignore[arg-type]
    one, other = (generator.generate(PROMPT, max_new_tokens=kind(4), do_sample=True, seed=kind(7)) for kind in (int, np.int64))
    assert one.sequences == other.sequences


def _end_at(generator: Generator, monkeypatch: pytest.MonkeyPatch, *stops: int) -> None:
    model = dataclasses.replace(generator.manifest.model, eos_token_ids=stops)
    monkeypatch.setattr(generator, "manifest", dataclasses.replace(generator.manifest, model=model))


def test_each_row_ends_at_its_own_stop_token(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[5, 6], [9, 8, 7], [11]]
    free = generator.generate(prompts, max_new_tokens=10, ignore_eos=True)
    stop = free.sequences[1].token_ids[3]
    _end_at(generator, monkeypatch, stop)
    for row, whole in zip(generator.generate(prompts, max_new_tokens=10).sequences, free.sequences, strict=True):
        if stop in whole.token_ids:
            assert (row.token_ids, row.finish_reason) == (whole.token_ids[: whole.token_ids.index(stop) + 1], "stop")
        else:
            assert (row.token_ids, row.finish_reason) == (whole.token_ids, "length")
    assert generator.generate(prompts, max_new_tokens=10, ignore_eos=True).sequences == free.sequences


def test_a_stop_token_in_the_last_place_is_the_finish_reason(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    free = generator.generate(PROMPT, max_new_tokens=6, ignore_eos=True).sequences[0].token_ids
    count = free.index(free[5]) + 1
    _end_at(generator, monkeypatch, free[5])
    (row,) = generator.generate(PROMPT, max_new_tokens=count).sequences
    assert (row.token_ids, row.finish_reason) == (free[:count], "stop")


def test_ended_rows_are_dropped_when_half_of_the_rows_have_ended(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[5, 6], [9, 8, 7], [11], [40, 3, 9, 9]]
    how: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "seed": 3, "temperature": 3.0}
    free = [row.token_ids for row in generator.generate(prompts, ignore_eos=True, **how).sequences]
    stops = (free[0][2], free[1][9], free[3][5])
    expected = [ids[: next((at + 1 for at, token in enumerate(ids) if token in stops), 16)] for ids in free]
    assert len({len(ids) for ids in expected}) == len(prompts)
    kept: list[int] = []
    keep_rows = Decoder.keep_rows
    monkeypatch.setattr(Decoder, "keep_rows", lambda decoder, rows: (kept.append(len(rows)), keep_rows(decoder, rows)))
    _end_at(generator, monkeypatch, *stops)
    found = generator.generate(prompts, **how)
    assert [row.token_ids for row in found.sequences] == expected
    assert kept == [2, 1]


def test_a_seed_repeats_its_tokens_and_another_seed_does_not(generator: Generator) -> None:
    def sample(seed: int) -> list[int]:
        return generator.generate(PROMPT, max_new_tokens=20, do_sample=True, seed=seed, ignore_eos=True).sequences[0].token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_a_sampled_row_is_the_same_alone_and_first_in_a_ragged_batch(generator: Generator) -> None:
    alone = generator.generate(PROMPT, max_new_tokens=10, do_sample=True, seed=5, ignore_eos=True).sequences[0]
    batch = generator.generate([PROMPT, [3] * 9], max_new_tokens=10, do_sample=True, seed=5, ignore_eos=True).sequences[0]
    assert batch.token_ids == alone.token_ids


def test_a_streamer_gets_each_steps_tokens_and_the_end(generator: Generator) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.rows: list[list[int]] = []
            self.ended = 0

        def put(self, value: np.ndarray) -> None:
            self.rows.append(value.tolist())

        def end(self) -> None:
            self.ended += 1

    recorder = Recorder()
    result = generator.generate([PROMPT, [9]], max_new_tokens=7, streamer=recorder, ignore_eos=True)
    assert recorder.ended == 1
    assert [list(row) for row in zip(*recorder.rows, strict=True)] == [row.token_ids for row in result.sequences]


def test_a_schedule_that_cuts_through_a_segment_is_refused(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> None:
    from skipdecode.exporter.export import ExportRequest, export
    from skipdecode.schedule_builders import ScheduleRequest

    out = tmp_path_factory.mktemp("full") / "bundle"
    export(ExportRequest(model=str(zoo.checkpoint("opt")), out=out, schedule=ScheduleRequest(name="full"), max_length=MAX_LENGTH))
    other = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=(6, 3))
    with pytest.raises(CapacityError, match="export the model with that schedule"):
        skipdecode.load(out).generate(PROMPT, schedule=other)
    with pytest.raises(CapacityError, match=f"the schedule is for 12 layers, but the model has {LAYERS}; choose another"):
        skipdecode.load(out).generate(PROMPT, schedule=full_depth(12))


def test_a_schedule_that_skips_a_layer_whose_keys_others_read_is_refused(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = LayerGroup(layers=(5,), keys=None, keys_of=0, states=())
    model = dataclasses.replace(generator.manifest.model, state_layers=(reading,))
    monkeypatch.setattr(generator, "manifest", dataclasses.replace(generator.manifest, model=model))
    skipping = Schedule(name="table", num_layers=LAYERS, warmup_layers=0, layers=(6, 3))
    with pytest.raises(ScheduleError, match="skips layer 0, whose keys and values later layers read"):
        generator.generate(PROMPT, max_new_tokens=3, schedule=skipping)


@pytest.mark.parametrize("ignored", [{"temperature": 0.8}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_sampling_options_without_sampling_draw_a_warning(
    ignored: dict[str, Any], generator: Generator, caplog: pytest.LogCaptureFixture
) -> None:
    greedy = generator.generate(PROMPT, max_new_tokens=4, seed=3).sequences
    assert caplog.messages == []
    assert generator.generate(PROMPT, max_new_tokens=4, **ignored).sequences == greedy
    assert caplog.messages == ["temperature, top_k and top_p have no effect: do_sample is False, so the likeliest token is taken"]


def test_seconds_of_prompts_and_steps_are_reported_separately(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def stream(rows: list[Row], **_: Any) -> Iterator[Step]:
        nonlocal now
        for seconds, layers in ((1.0, None), (3.0, 6), (4.0, 5)):
            now += seconds
            for row in rows:
                row.token_ids.append(5)
            yield Step((5, 5), layers)

    monkeypatch.setattr(generator, "stream", stream)
    monkeypatch.setattr("skipdecode.generate.time.perf_counter", lambda: now)
    timings = generator.generate([PROMPT, [9]]).timings
    assert (timings.prefill_s, timings.decode_s, timings.tokens_per_s) == (1, 7, 6 / 8)


def test_a_long_prompt_runs_in_chunks_of_the_requested_size(generator: Generator) -> None:
    asked, seen = skipdecode.load(generator.path, prefill_chunk=3), []

    class Watched:
        def bind(self, inputs: Any, outputs: Any) -> Any:
            seen.append(inputs["input_ids"].shape)
            return generator.engines.embed.bind(inputs, outputs)

    asked.engines = dataclasses.replace(asked.engines, embed=Watched())
    prompt = [*PROMPT, 8, 9, 11]
    assert asked.generate(prompt, max_new_tokens=2).sequences == generator.generate(prompt, max_new_tokens=2).sequences
    assert seen == [(1, 1), (1, 3), (1, 3), (1, 1)], "the decode step's binding, then the prompt's"


def test_rows_that_have_run_or_hold_no_ids_are_refused(generator: Generator) -> None:
    rows = [Row(prompt_ids=PROMPT), Row(prompt_ids=PROMPT)]
    with pytest.raises(CapacityError, match=r"prompt 1: token id 5\.5 is outside the vocabulary"):
        next(generator.stream([rows[0], Row(prompt_ids=[5.5])], max_new_tokens=3, sampling=Sampling()))  # type: ignore[list-item]
    for _ in generator.stream(rows[:1], max_new_tokens=3, sampling=Sampling()):
        pass
    with pytest.raises(CapacityError, match="prompt 1: has tokens from an earlier run; create a new Row"):
        next(generator.stream(rows[::-1], max_new_tokens=3, sampling=Sampling()))
    with pytest.raises(CapacityError, match="prompt 0: has tokens from an earlier run; create a new Row"):
        next(generator.stream([Row(prompt_ids=PROMPT, finish_reason="stop")], max_new_tokens=3, sampling=Sampling()))
    with pytest.raises(CapacityError, match="there is no prompt; give at least one"):
        next(generator.stream([], max_new_tokens=3, sampling=Sampling()))
    with pytest.raises(CapacityError, match="rows: the same Row is given twice; create one per prompt"):
        next(generator.stream([rows[1]] * 2, max_new_tokens=3, sampling=Sampling()))


def test_a_caller_may_end_rows_between_two_steps(generator: Generator) -> None:
    rows = [Row(prompt_ids=PROMPT), Row(prompt_ids=[9]), Row(prompt_ids=[9])]
    steps = []
    for step in generator.stream(rows, max_new_tokens=20, sampling=Sampling(), ignore_eos=True):
        steps.append(step.token_ids)
        if len(steps) == 2:
            rows[0].finish_reason = "a stop string"
        if len(steps) == 5:
            rows[1].finish_reason = rows[2].finish_reason = "the client has left"
    assert [len(row.token_ids) for row in rows] == [2, 5, 5]
    assert [step[0] is None for step in steps] == [False] * 2 + [True] * 3
    alone = generator.generate([9], max_new_tokens=5, ignore_eos=True)
    assert rows[1].token_ids == rows[2].token_ids == alone.sequences[0].token_ids


@pytest.mark.parametrize("more", [1 << 40, 1 << 62])  # more than the machine has; more than an address can name
def test_memory_that_the_machine_lacks_is_reported_with_its_size(
    more: int, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = np.zeros

    def none_left(shape: Any, dtype: Any = float) -> Any:
        return zeros((more, *shape) if dtype == np.float32 else shape, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", none_left)
        with pytest.raises(CapacityError, match=r"no memory is left for \d+ MiB; send fewer rows or shorter prompts"):
            generator.generate(PROMPT, max_new_tokens=3)
    assert generator.generate(PROMPT, max_new_tokens=3).sequences
