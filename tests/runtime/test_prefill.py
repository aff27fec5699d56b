"""Passes over prompts: which rows share one, and that sharing changes nothing but the time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skipdecode
from skipdecode.decoder import Decoder
from skipdecode.device import Call
from skipdecode.engines import Engine, Segment
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.memory import Array
from skipdecode.prefill import _group_rows
from skipdecode.schedule import Anchor, Schedule, full_depth
from skipdecode.schedule_builders import ScheduleRequest
from tests.models import LAYERS
from tests.zoo import Zoo

PROMPTS = [[5, 6, 7, 20, 9, 11, 12, 40], [8, 9, 1, 33, 5, 6], [4, 70, 71, 3, 2, 98], [9]]
SCHEDULES = {
    "full depth": full_depth(LAYERS),
    "skipped layers without slots": Schedule(name="table", num_layers=LAYERS, layers=(4, 2), warmup_layers=1),
    "absolute": Schedule(name="table", num_layers=LAYERS, layers=(6, 6, 6, 4, 4, 2), warmup_layers=1, anchor=Anchor.ABSOLUTE),
}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 100), st.integers(0, 6))
def test_passes_take_every_row_once_and_share_only_what_fits(lengths: list[int], most: int, padding: int) -> None:
    lengths.sort(reverse=True)
    passes = list(_group_rows(lengths, most, padding))
    assert [row for rows in passes for row in range(rows.start, rows.stop)] == list(range(len(lengths)))
    for rows in passes:
        shared = lengths[rows]
        assert len(shared) == 1 or (len(shared) * shared[0] <= most and shared[0] - shared[-1] <= padding)


def test_short_prompts_of_similar_length_share_a_pass() -> None:
    assert list(_group_rows([8, 6, 6, 1], 512, 4)) == [slice(0, 3), slice(3, 4)]
    assert list(_group_rows([8, 8, 8, 8], 16, 4)) == [slice(0, 2), slice(2, 4)]
    assert list(_group_rows([8, 6, 6, 1], 512, 0)) == [slice(0, 1), slice(1, 3), slice(3, 4)]


@pytest.mark.parametrize("name", ["opt", "llama", "gemma2", "qwen3_5_text"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_rows_that_share_a_pass_get_the_same_logits_as_alone(name: str, schedule: Schedule, zoo: Zoo) -> None:
    generator = skipdecode.load(zoo.bundle(name))
    together, alone = _decode(generator.decoder([len(prompt) for prompt in PROMPTS], 4, schedule), PROMPTS), []
    for prompt in PROMPTS:
        alone.append(_decode(generator.decoder([len(prompt)], 4, schedule), [prompt]))
    np.testing.assert_allclose(together, np.concatenate(alone, axis=1), rtol=0, atol=1e-4)


def _decode(decoder: Decoder, prompts: list[list[int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Logits [steps, rows, V] of the prompt's pass and of three steps."""
    decoder.prefill(prompts)
    found = [decoder.logits.copy()]
    for token in (7, 8, 9):
        decoder.decode_step(np.full(len(prompts), token))
        found.append(decoder.logits.copy())
    return np.stack(found)


@dataclasses.dataclass
class _Watched:
    """An engine, and the shapes of the hidden states that it is given."""

    engine: Engine
    seen: list[tuple[int, ...]] = dataclasses.field(default_factory=list)

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Call:
        self.seen.append(tuple(inputs["hidden"].shape))
        return self.engine.bind(inputs, outputs)


def test_a_prompt_runs_in_parts_that_the_engines_take_whatever_is_asked_for(zoo: Zoo) -> None:
    """As plans, whose passes have at most 512 tokens."""
    generator = skipdecode.load(zoo.bundle("llama"))
    first, *others = generator.engines.segments
    watched = _Watched(first.engine)
    segments = (Segment(first.layers, watched), *others)
    engines = dataclasses.replace(generator.engines, max_prompt_tokens=3, segments=segments)
    made = generator.manifest
    Decoder(engines, made.model, made.schedule, [8], 4, prefill_chunk=100).prefill(PROMPTS[:1])
    assert [tokens for _, tokens, _ in watched.seen] == [3, 3, 2]


def test_layers_that_keep_nothing_compute_only_the_last_token_of_each_prompt(zoo: Zoo, tmp_path: Path) -> None:
    """Two of three prompts share a pass."""
    schedule = ScheduleRequest(name="linear", max_layers=6, min_layers=4, span=4)
    export(ExportRequest(model=str(zoo.checkpoint("reading_others")), out=tmp_path / "bundle", schedule=schedule, max_length=48))
    generator = skipdecode.load(tmp_path / "bundle")
    watched = [(segment.layers, _Watched(segment.engine)) for segment in generator.engines.segments]
    generator.engines = dataclasses.replace(generator.engines, segments=tuple(Segment(*one) for one in watched))
    generator.decoder([len(prompt) for prompt in PROMPTS], 4).prefill(PROMPTS)
    assert [engine.seen for layers, engine in watched if layers[0] < 3] == [[(3, 8, 208), (1, 1, 208)]]
    assert [engine.seen for layers, engine in watched if layers[0] >= 3] == 3 * [[(3, 1, 208), (1, 1, 208)]]
