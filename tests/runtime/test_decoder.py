"""A decoder, step by step."""

from __future__ import annotations

import numpy as np
import pytest

import skipdecode
from skipdecode.errors import CapacityError, TargetError
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import ScheduleRequest, build_schedule
from tests.models import LAYERS
from tests.zoo import Zoo

PROMPTS = [[9, 8, 7, 6, 5, 4, 3, 17, 23], [4, 50, 6, 70, 3], [31, 5, 6, 12, 9], [5, 6], [11]]
STEPS = 9
KEPT = {2: [0, 2, 4], 5: [1]}  # before which step, which of the rows that there are: the third prompt is left


@pytest.mark.parametrize("anchor", list(Anchor))
@pytest.mark.parametrize("name", ["llama", "falcon_h1", "lfm2"])  # keys and values, states beside them, states in their place
def test_rows_that_are_kept_go_on_as_they_would_among_all(name: str, anchor: Anchor, zoo: Zoo) -> None:
    generator = skipdecode.load(zoo.bundle(name))
    schedule = build_schedule(ScheduleRequest(name="linear", max_layers=5, min_layers=2, span=9, anchor=anchor), LAYERS)
    fed = np.random.default_rng(0).integers(3, 90, (STEPS, len(PROMPTS)))
    among_all, alone = (generator.decoder([len(prompt) for prompt in PROMPTS], STEPS + 1, schedule) for _ in range(2))
    rows = list(range(len(PROMPTS)))
    for decoder in (among_all, alone):
        decoder.prefill(PROMPTS)
    for step, tokens in enumerate(fed):
        if step in KEPT:
            alone.keep_rows(KEPT[step])
            rows = [rows[index] for index in KEPT[step]]
        among_all.decode_step(tokens)
        assert alone.decode_step(tokens[rows]) == schedule.layers_at(
            step if anchor is Anchor.GENERATED else len(PROMPTS[rows[-1]]) + step
        )
        assert alone.logits.shape[0] == len(rows)
        np.testing.assert_allclose(alone.logits, among_all.logits[rows], rtol=1e-4, atol=1e-5)
    assert rows == [2]


def test_steps_beyond_those_there_is_room_for_are_refused(zoo: Zoo, capfd: pytest.CaptureFixture[str]) -> None:
    decoder = skipdecode.load(zoo.bundle("llama")).decoder([2, 1], 2)
    decoder.prefill([[5, 6], [7]])
    for _ in range(2):
        decoder.decode_step([8, 9])
    for _ in range(2):
        with pytest.raises(CapacityError, match="the KV buffer's 4 slots are full; make the decoder for more steps"):
            decoder.decode_step([8, 9])
    decoder._capacity += 1  # what ONNX Runtime says where nobody asked before
    says = (
        r"segment_000\.onnx: ONNX Runtime stopped \(.*GroupQueryAttention.*\); check the bundle with skip-inspect --check-hashes$"
    )
    capfd.readouterr()
    with pytest.raises(TargetError, match=says):
        decoder.decode_step([8, 9])
    assert capfd.readouterr() == ("", ""), "the error says it all"


def test_the_room_for_steps_is_that_of_the_longest_row_that_is_left(zoo: Zoo) -> None:
    decoder = skipdecode.load(zoo.bundle("llama")).decoder([2, 1], 2)
    decoder.prefill([[5, 6], [7]])
    decoder.keep_rows([1])
    for _ in range(3):
        decoder.decode_step([9])
    with pytest.raises(CapacityError, match="the KV buffer's 4 slots are full"):
        decoder.decode_step([9])
