"""The schedule's promises (DESIGN.md section 3), for every schedule that can be constructed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipdecode.errors import ScheduleError
from skipdecode.schedule import Anchor, Schedule, full_depth, least_layers


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    depth = draw(st.integers(1, 40))
    warmup = draw(st.integers(0, depth))
    counts = draw(st.lists(st.integers(least_layers(depth, warmup), depth), min_size=1, max_size=60))
    return Schedule(name="table", num_layers=depth, warmup_layers=warmup, layers=tuple(sorted(counts, reverse=True)))


@given(schedules(), st.integers(0, 100))
def test_a_layer_skipped_at_t_is_skipped_ever_after(schedule: Schedule, t: int) -> None:
    assert set(schedule.active(t + 1)) <= set(schedule.active(t))


@given(schedules())
def test_positions_of_a_layer_are_a_prefix_that_ends_at_its_cap(schedule: Schedule) -> None:
    positions = range(schedule.span + 5)
    for layer in range(schedule.num_layers):
        active = [t for t in positions if layer in schedule.active(t)]
        cap = schedule.cap(layer)
        assert active == list(positions)[: len(positions) if cap is None else cap]


@given(schedules(), st.integers(0, 100))
def test_active_layers_are_the_first_w_and_the_last_rest(schedule: Schedule, t: int) -> None:
    active = schedule.active(t)
    w = min(schedule.warmup_layers, len(active))
    assert len(active) == schedule.layers_at(t)
    assert active == tuple(sorted(set(active)))
    assert active[:w] == tuple(range(w))
    assert active[w:] == tuple(range(schedule.num_layers - len(active) + w, schedule.num_layers))


@given(schedules(), st.integers(0, 1000))
def test_positions_beyond_the_span_stay_at_the_last_count(schedule: Schedule, beyond: int) -> None:
    assert schedule.layers_at(schedule.span + beyond) == schedule.layers[-1]


@given(schedules())
def test_variants_are_the_distinct_counts_most_layers_first(schedule: Schedule) -> None:
    assert schedule.variants == tuple(sorted({schedule.layers_at(t) for t in range(schedule.span)}, reverse=True))


def test_early_exit_computes_the_first_layers_and_none_on_top() -> None:
    schedule = Schedule(name="table", num_layers=6, warmup_layers=6, layers=(6, 4, 1))
    assert [schedule.active(t) for t in range(3)] == [(0, 1, 2, 3, 4, 5), (0, 1, 2, 3), (0,)]
    assert [schedule.cap(layer) for layer in range(6)] == [None, 2, 2, 2, 1, 1]


def test_full_depth_computes_every_layer_everywhere() -> None:
    schedule = full_depth(5)
    assert schedule.active(0) == schedule.active(999) == (0, 1, 2, 3, 4)
    assert [schedule.cap(layer) for layer in range(5)] == [None] * 5


@pytest.mark.parametrize(
    ("layers", "warmup", "says"),
    [
        ((4, 5), 1, "rises from 4 to 5 at position 1"),
        ((7,), 1, "choose counts from 2 to 6"),
        ((1,), 1, "choose counts from 2 to 6"),
        ((), 1, "empty"),
        ((6, 5), 5, "choose counts from 6 to 6"),
        ((6, 0), 6, "choose counts from 1 to 6"),
        ((6,), 7, "--warmup-layers 0..5, or 6 for early exit"),
        ((6,), -1, "--warmup-layers 0..5"),
    ],
)
def test_a_schedule_that_breaks_a_promise_cannot_be_constructed(layers: tuple[int, ...], warmup: int, says: str) -> None:
    with pytest.raises(ScheduleError, match=says) as caught:
        Schedule(name="table", num_layers=6, warmup_layers=warmup, layers=layers)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("anchor", Anchor)
def test_an_anchor_may_be_given_by_its_value(anchor: Anchor) -> None:
    made = Schedule(name="table", num_layers=4, warmup_layers=1, layers=(4, 2), anchor=anchor.value)  # type: ignore[arg-type]
    assert made.anchor is anchor


def test_an_unknown_anchor_and_fractional_counts_are_refused() -> None:
    with pytest.raises(ScheduleError, match="the anchor is 'prompt'; choose generated or absolute"):
        Schedule(name="table", num_layers=4, warmup_layers=1, layers=(4, 2), anchor="prompt")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"3.5 layers at position 1.*; choose counts from 2 to 4"):
        Schedule(name="table", num_layers=4, warmup_layers=1, layers=(4, 3.5))  # type: ignore[arg-type]
