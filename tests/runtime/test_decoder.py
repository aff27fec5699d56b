"""A decoder, step by step."""

from __future__ import annotations

import numpy as np
import pytest

import skipdecode
from skipdecode import decoder as decoders
from skipdecode.decoder import Route
from skipdecode.errors import CapacityError, TargetError
from skipdecode.schedule import Anchor, Schedule
from skipdecode.schedule_builders import ScheduleRequest, build_schedule
from tests.models import LAYERS
from tests.zoo import Zoo

PROMPTS = [[9, 8, 7, 6, 5, 4, 3, 17, 23], [4, 50, 6, 70, 3], [31, 5, 6, 12, 9], [5, 6], [11]]
STEPS = 9
KEPT = {2: [0, 2, 4], 5: [1]}  # step: which of the current rows are kept before it; in the end only the third prompt's is left


@pytest.mark.parametrize("anchor", list(Anchor))
@pytest.mark.parametrize("name", ["llama", "falcon_h1", "lfm2"])  # keys and values; states alongside them; states in their place
def test_kept_rows_go_on_as_they_would_with_all_rows(name: str, anchor: Anchor, zoo: Zoo) -> None:
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


def test_rows_that_were_dropped_are_computed_no_more(zoo: Zoo) -> None:
    full = build_schedule(ScheduleRequest(name="full"), LAYERS)  # the next step computes as many layers as the one before
    decoder = skipdecode.load(zoo.bundle("llama")).decoder([len(prompt) for prompt in PROMPTS], STEPS, full)
    decoder.prefill(PROMPTS)
    decoder.decode_step([7] * len(PROMPTS))
    logits = decoder.logits[:3]
    decoder.keep_rows([1, 4])
    keys = decoder.kv.layers[0]["past_key.0"][:3]
    logits[:] = keys[:] = np.nan
    decoder.decode_step([8, 9])
    assert np.isnan(logits).all() and np.isnan(keys).all() and np.isfinite(decoder.logits).all()


def test_of_all_routes_the_one_that_was_not_taken_for_longest_is_dropped(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "MAX_ROUTES", 2)
    schedule = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=(6, 5, 4), anchor=Anchor.ABSOLUTE)
    decoder = skipdecode.load(zoo.bundle("llama")).decoder([2], STEPS, schedule)

    def route_at(length: int) -> Route:
        decoder.rewind(0, length)
        return decoder.route()

    first, second = route_at(0), route_at(1)
    assert route_at(0) is first
    third = route_at(2)
    assert (route_at(0) is first, route_at(2) is third, route_at(1) is second) == (True, True, False)


def test_steps_that_the_kv_buffer_has_no_room_for_are_refused(zoo: Zoo, capfd: pytest.CaptureFixture[str]) -> None:
    decoder = skipdecode.load(zoo.bundle("llama")).decoder([2, 1], 2)
    decoder.prefill([[5, 6], [7]])
    for _ in range(2):
        decoder.decode_step([8, 9])
    for _ in range(2):
        with pytest.raises(CapacityError, match="the KV buffer's 4 slots are full; create the decoder for more steps"):
            decoder.decode_step([8, 9])
    decoder._capacity += 1  # lets the step pass the check, so that ONNX Runtime reports the error
    says = (
        r"segment_000\.onnx: ONNX Runtime stopped \(.*GroupQueryAttention.*\); check the bundle with skip-inspect --check-hashes$"
    )
    capfd.readouterr()
    with pytest.raises(TargetError, match=says):
        decoder.decode_step([8, 9])
    assert capfd.readouterr() == ("", ""), "nothing is printed besides the error"


def test_the_room_for_steps_is_that_of_the_longest_row_left(zoo: Zoo) -> None:
    decoder = skipdecode.load(zoo.bundle("llama")).decoder([2, 1], 2)
    decoder.prefill([[5, 6], [7]])
    decoder.keep_rows([1])
    for _ in range(3):
        decoder.decode_step([9])
    with pytest.raises(CapacityError, match="the KV buffer's 4 slots are full"):
        decoder.decode_step([9])
