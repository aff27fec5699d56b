"""Every architecture, exported and run, against the torch reference."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import skipdecode
from skipdecode.exporter.reference import greedy_tokens
from skipdecode.schedule import Anchor, Schedule, full_depth
from skipdecode.schedule_builders import ScheduleRequest, build_schedule
from tests.models import CONFIGS, LAYERS
from tests.zoo import Zoo

NEW = 12
NAMES = [*CONFIGS, "qwen3_5_text", "falcon_h1"]  # which keep states instead of keys and values, and besides them
RAGGED = [[5, 6], [9, 8, 7, 6, 5, 4, 3, 17, 23], [11], [4, 50, 6, 70]]


def _schedules(tmp_path: Path) -> list[Schedule]:
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"layers": [6, 6, 4, 4, 3, 3, 1], "warmup_layers": 0}))
    requests = [
        ScheduleRequest(name=name, max_layers=top, min_layers=2, span=9, anchor=anchor)
        for name, top in (("linear", 5), ("step", 6), (f"table:{table}", None))
        for anchor in Anchor
    ]
    early_exit = Schedule(name="table", num_layers=LAYERS, warmup_layers=LAYERS, layers=(6, 4, 4, 3, 1))
    return [full_depth(LAYERS), early_exit, *(build_schedule(request, LAYERS) for request in requests)]


Reference = Callable[[str, Schedule, tuple[int, ...]], tuple[list[int], torch.Tensor]]


@pytest.fixture(scope="module")
def reference(zoo: Zoo) -> Reference:
    """Gives new tokens and their logits by architecture, schedule and prompt. Whole passes are slow, so both tests share them."""
    model = functools.cache(zoo.model)
    return functools.cache(lambda name, schedule, prompt: greedy_tokens(model(name), schedule, list(prompt), NEW))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_the_reference_for_every_schedule_alone_and_in_a_ragged_batch(
    name: str, zoo: Zoo, reference: Reference, tmp_path: Path
) -> None:
    generator = skipdecode.load(zoo.bundle(name))
    for schedule in _schedules(tmp_path):
        expected = [reference(name, schedule, tuple(prompt))[0] for prompt in RAGGED]
        batch = generator.generate(RAGGED, max_new_tokens=NEW, schedule=schedule, ignore_eos=True)
        assert [row.token_ids for row in batch.sequences] == expected, schedule
        alone = generator.generate(RAGGED[1], max_new_tokens=NEW, schedule=schedule, ignore_eos=True)
        assert alone.sequences[0].token_ids == expected[1], schedule
        if schedule.anchor is Anchor.GENERATED:
            assert batch.layers == tuple(schedule.layers_at(t) for t in range(NEW - 1))


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_step_are_within_a_thousandth_of_the_reference(
    name: str, zoo: Zoo, reference: Reference, tmp_path: Path
) -> None:
    generator = skipdecode.load(zoo.bundle(name))
    prompt = RAGGED[1]
    for schedule in _schedules(tmp_path):
        tokens, expected = reference(name, schedule, tuple(prompt))
        decoder = generator.decoder([len(prompt)], NEW, schedule)
        decoder.prefill([prompt])
        for step, row in enumerate(expected.numpy()):
            if step:
                decoder.decode_step(np.array([tokens[step - 1]]))
            assert np.abs(decoder.logits[0] - row).max() <= 1e-3 * np.abs(row).max(), (schedule, step)


@pytest.mark.parametrize("name", NAMES)
def test_full_depth_equals_transformers_generate(name: str, zoo: Zoo) -> None:
    generator, model = skipdecode.load(zoo.bundle(name)), zoo.model(name)
    prompt = RAGGED[1]
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, attention_mask=torch.ones(1, len(prompt))
    )
    result = generator.generate(prompt, max_new_tokens=NEW, schedule="full", ignore_eos=True)
    expected = out[0, len(prompt) :].tolist()
    stop = next((i for i, token in enumerate(result.sequences[0].token_ids) if token == 2), NEW)
    assert result.sequences[0].token_ids[:stop] == expected[:stop]  # from there on min_new_tokens forbids the stop token


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
@pytest.mark.parametrize("chunk", [1, 7, 30, 999])
def test_a_long_prompt_runs_in_chunks_with_the_same_tokens(name: str, zoo: Zoo, chunk: int) -> None:
    prompt = [(7 * i) % 90 for i in range(30)]
    whole = skipdecode.load(zoo.bundle(name)).generate(prompt, max_new_tokens=NEW, ignore_eos=True)
    chunked = skipdecode.load(zoo.bundle(name), prefill_chunk=chunk)
    assert chunked.generate(prompt, max_new_tokens=NEW, ignore_eos=True).sequences == whole.sequences
