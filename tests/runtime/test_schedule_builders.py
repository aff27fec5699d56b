"""Schedules built from what a user asks for."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from skipdecode.errors import ScheduleError
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import ScheduleRequest, build_schedule, unmet_requests

SHAPES = st.sampled_from(["linear", "step", "power"])


@pytest.mark.parametrize(("speedup", "top", "bottom"), [(2, 18, 6), (4, 9, 3), (1.2, 24, 16), (1, 24, 24)])
def test_linear_on_24_layers_runs_between_the_two_layer_counts_of_the_speedup(speedup: float, top: int, bottom: int) -> None:
    schedule = build_schedule(ScheduleRequest(speedup=speedup), 24)
    assert (schedule.layers[0], schedule.layers[-1]) == (top, bottom)


@given(SHAPES, st.integers(2, 64), st.floats(1, 10), st.integers(0, 3), st.integers(1, 300))
@example("step", 37, 2.0, 0, 9)
def test_mean_layers_are_within_one_of_what_the_speedup_promises(
    name: str, depth: int, speedup: float, warmup: int, span: int
) -> None:
    assume(warmup <= depth)
    try:
        schedule = build_schedule(ScheduleRequest(name=name, speedup=speedup, warmup_layers=warmup, span=span), depth)
    except ScheduleError as error:
        assert "the nearest that can is --speedup" in str(error)
        return
    if span >= 2 * len(schedule.variants):  # a span shorter than the stairs cannot average finely
        uneven = (schedule.layers[0] - schedule.layers[-1]) / (2 * span)  # stairs that do not divide the span: half a position
        assert abs(schedule.mean_layers - depth / speedup) <= 1 + uneven


@given(
    SHAPES, st.integers(2, 64), st.floats(0.1, 100), st.integers(0, 6), st.integers(1, 64),
    st.none() | st.integers(2, 64), st.none() | st.integers(2, 64),
)  # fmt: skip
def test_the_speedup_that_an_error_names_can_be_reached(
    name: str, depth: int, speedup: float, warmup: int, span: int, top: int | None, bottom: int | None
) -> None:
    request = ScheduleRequest(name=name, speedup=speedup, warmup_layers=warmup, span=span, max_layers=top, min_layers=bottom)
    try:
        build_schedule(request, depth)
    except ScheduleError as error:
        assume("the nearest that can is --speedup " in str(error))
        named = float(str(error).rsplit("--speedup ", 1)[1])
        build_schedule(dataclasses.replace(request, speedup=named), depth)


@given(SHAPES, st.integers(4, 48), st.integers(1, 12))
def test_max_variants_rounds_up_to_at_most_that_many_counts(name: str, depth: int, limit: int) -> None:
    free = build_schedule(ScheduleRequest(name=name, min_layers=2, max_layers=depth), depth)
    limited = build_schedule(ScheduleRequest(name=name, min_layers=2, max_layers=depth, max_variants=limit), depth)
    assert len(limited.variants) <= limit
    if name != "step":  # max_variants is its number of stairs
        assert all(after >= before for before, after in zip(free.layers, limited.layers, strict=True))


def test_explicit_values_are_kept() -> None:
    schedule = build_schedule(ScheduleRequest(max_layers=20, min_layers=5, span=10, warmup_layers=2), 24)
    assert (schedule.layers[0], schedule.layers[-1], schedule.span, schedule.warmup_layers) == (20, 5, 10, 2)
    assert build_schedule(ScheduleRequest(speedup=2, max_layers=14), 24).layers[-1] == 10
    assert build_schedule(ScheduleRequest(speedup=2, min_layers=4), 24).layers[0] == 20
    assert build_schedule(ScheduleRequest(max_layers=4, span=3), 24).layers == (4, 4, 4), "2x would come down to 6"


def test_few_variants_change_neither_warm_up_layers_nor_anchor() -> None:
    asked = ScheduleRequest(max_layers=24, min_layers=4, span=8, max_variants=2, warmup_layers=3, anchor=Anchor.ABSOLUTE)
    schedule = build_schedule(asked, 24)
    assert schedule.layers == (24,) * 4 + (13,) * 4
    assert (schedule.warmup_layers, schedule.anchor) == (3, Anchor.ABSOLUTE)


def test_the_default_is_half_the_layers_over_128_positions() -> None:
    schedule = build_schedule(ScheduleRequest(), 24)
    assert (schedule.mean_layers, schedule.span, schedule.anchor) == (12, 128, Anchor.GENERATED)


@pytest.mark.parametrize("name", ["linear", "power", "step"])
def test_equal_ends_give_one_count(name: str) -> None:
    assert build_schedule(ScheduleRequest(name=name, max_layers=12, min_layers=12, span=3), 24).layers == (12, 12, 12)


def test_the_longest_span_is_built_and_one_more_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipdecode.schedule_builders._MAX_SPAN", 8)
    assert build_schedule(ScheduleRequest(span=8), 6).span == 8
    _refused(ScheduleRequest(span=9), "choose --span 8 or less")


def test_half_a_layer_beyond_what_the_ends_reach_counts_as_rounding() -> None:
    schedule = build_schedule(ScheduleRequest(speedup=2, max_layers=18, warmup_layers=6), 24)
    assert (schedule.layers[0], schedule.layers[-1], schedule.mean_layers) == (18, 7, 12.5)
    exactly_half = ScheduleRequest(speedup=2, max_layers=18, warmup_layers=6)
    nearest = ScheduleRequest(name="linear", warmup_layers=1)  # 2 of 3 layers at least
    assert [*unmet_requests(exactly_half, schedule), *unmet_requests(nearest, build_schedule(nearest, 3))] == []


def test_power_decays_by_alpha() -> None:
    schedule = build_schedule(ScheduleRequest(name="power", alpha=0.5, max_layers=16, min_layers=3, span=6), 24)
    assert schedule.layers == (16, 8, 4, 3, 3, 3)
    assert build_schedule(ScheduleRequest(name="power", alpha=1, max_layers=16, span=3), 24).layers == (16, 16, 16)


def test_power_between_two_ends_takes_the_whole_span() -> None:
    assert build_schedule(ScheduleRequest(name="power", max_layers=16, min_layers=2, span=4), 24).layers == (16, 8, 4, 2)


def test_the_floor_of_power_leaves_room_for_a_decay() -> None:
    schedule = build_schedule(ScheduleRequest(name="power", speedup=1.2), 24)
    assert (schedule.variants, schedule.mean_layers) == ((24, 23, 22, 21, 20, 19, 18, 17), 20)
    assert build_schedule(ScheduleRequest(name="power", span=3), 12).layers == (12, 3, 3), "the first position has them all"
    assert build_schedule(ScheduleRequest(name="power", span=2), 12).layers == (12, 2)


def test_power_does_not_lose_a_layer_to_rounding() -> None:
    assert build_schedule(ScheduleRequest(name="power", speedup=1.1, span=3), 3).layers == (3, 3, 2)


def test_step_has_equal_stairs() -> None:
    schedule = build_schedule(ScheduleRequest(name="step", max_layers=8, min_layers=2, span=8, max_variants=4), 8)
    assert schedule.layers == (8, 8, 6, 6, 4, 4, 2, 2)
    assert build_schedule(ScheduleRequest(name="step", speedup=2, span=3), 24).layers == (18, 12, 6), "one stair per position"


def test_a_table_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"layers": [6, 5, 3], "warmup_layers": 2}))
    schedule = build_schedule(ScheduleRequest(name=f"table:{path}"), 6)
    assert (schedule.layers, schedule.warmup_layers) == ((6, 5, 3), 2)
    path.write_text("[6, 4]", encoding="utf-8-sig")  # with a byte order mark, as Windows editors write it
    assert build_schedule(ScheduleRequest(name=f"table:{path}"), 6).layers == (6, 4)


def test_anchor_and_max_variants_apply_to_a_table_too(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("[6, 5, 4, 3]")
    schedule = build_schedule(ScheduleRequest(name=f"table:{path}", max_variants=2, anchor=Anchor.ABSOLUTE), 6)
    assert (schedule.layers, schedule.anchor) == ((6, 6, 4, 4), Anchor.ABSOLUTE)


def test_requests_that_a_table_does_not_meet_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("[6, 4, 2]")
    agreeing = ScheduleRequest(name=f"table:{path}", speedup=1.5, max_layers=6, min_layers=2)
    table = build_schedule(agreeing, 6)
    assert (table.layers, list(unmet_requests(agreeing, table))) == ((6, 4, 2), [])
    for other in (
        {"speedup": 3.0},
        {"max_layers": 5},
        {"min_layers": 3},
        {"speedup": 0.0},
        {"speedup": float("nan")},
        {"span": 9},
    ):
        asked = dataclasses.replace(agreeing, **other)  # type: ignore[arg-type]
        assert build_schedule(asked, 6) == table
        (told,) = unmet_requests(asked, table)
        option, value = next(iter(other.items()))
        assert told.startswith(f"--{option.replace('_', '-')} {value:g} changes nothing: the table schedule has 6 -> 2 layers")


def test_a_speedup_or_span_that_changes_nothing_at_full_depth_or_with_a_decay_is_reported() -> None:
    for asked in (ScheduleRequest(name="full", speedup=2), ScheduleRequest(name="power", alpha=0.5, speedup=2)):
        (told,) = unmet_requests(asked, build_schedule(asked, 24))
        assert told.startswith("--speedup 2 changes nothing: the ")
    (told,) = unmet_requests(asked := ScheduleRequest(name="full", span=9), build_schedule(asked, 24))
    assert told.startswith("--span 9 changes nothing: the full schedule has 24 -> 24 layers over 1 positions")
    for asked in (
        ScheduleRequest(speedup=2),
        ScheduleRequest(name="step", speedup=3, max_layers=12),
        ScheduleRequest(name="full"),
    ):
        assert list(unmet_requests(asked, build_schedule(asked, 24))) == []


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (ScheduleRequest(speedup=4, span=48, max_variants=1), "--speedup 4 is not met: the linear schedule has 9 -> 9 layers"),
        (
            ScheduleRequest(max_layers=24, min_layers=6, max_variants=3),
            "--min-layers 6 is not met: the linear schedule has 24 -> 11",
        ),
        (ScheduleRequest(name="power", speedup=4, max_variants=2), "--speedup 4 is not met: "),
        (
            ScheduleRequest(name="power", max_layers=16, min_layers=2, span=4, max_variants=2),
            "--min-layers 2 is not met: the power schedule has 16 -> 4 layers",
        ),
        (ScheduleRequest(speedup=6, max_variants=2), "--speedup 6 is not met: "),
        (ScheduleRequest(name="step", speedup=2, span=5), "--speedup 2 is not met: the step schedule has 18 -> 6 layers over 5"),
        (ScheduleRequest(name="linear", min_layers=6, span=1), "--min-layers 6 is not met: the linear schedule has 24 -> 24"),
        (ScheduleRequest(name="step", speedup=2, max_variants=1), None),
        (ScheduleRequest(name="power", speedup=1.2, min_layers=2), None),
    ],
)
def test_requests_missed_by_rounding_to_few_levels_are_reported(asked: ScheduleRequest, says: str | None) -> None:
    told = list(unmet_requests(asked, build_schedule(asked, 24)))
    assert not told if says is None else told[0].startswith(says)


def test_one_stair_is_the_mean_of_its_ends_unless_one_was_given() -> None:
    one = ScheduleRequest(name="step", speedup=2, max_variants=1, span=48)
    assert {*build_schedule(one, 24).layers} == {12}
    assert {*build_schedule(dataclasses.replace(one, speedup=None, max_layers=18, min_layers=6), 24).layers} == {18}


@pytest.mark.parametrize("name", ["linear", "power", "step"])
def test_where_warm_up_layers_rule_out_the_default_speedup_the_nearest_is_taken_and_reported(name: str) -> None:
    asked = ScheduleRequest(name=name, warmup_layers=24)
    schedule = build_schedule(asked, 42)
    assert schedule.layers[-1] == 25 and schedule.mean_layers < 26
    (told,) = unmet_requests(asked, schedule)
    assert told.startswith("at least 25 of 42 layers are computed, so the default of 2x cannot be reached: it is 1.6")
    with pytest.raises(ScheduleError, match=r"the nearest that can is --speedup 1\.6"):
        build_schedule(dataclasses.replace(asked, speedup=2), 42)
    few = dataclasses.replace(asked, warmup_layers=1, max_variants=2)
    assert list(unmet_requests(few, build_schedule(few, 42))) == []


def test_one_position_has_the_count_that_the_speedup_asks_for() -> None:
    for name in ("linear", "step"):
        assert build_schedule(ScheduleRequest(name=name, speedup=2, span=1), 24).layers == (12,)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[4, 5]", "rises"),
        ("{", "is not JSON"),
        ('"x"', "list of whole numbers"),
        ("[4, true]", "list of whole numbers"),
        ("[4, 3.5]", "list of whole numbers"),
        ('{"layers": [4], "extra": 1}', "has keys"),
        ('{"warmup_layers": 1}', "has keys"),
        ('{"layers": [4], "warmup_layers": "x"}', "list of whole numbers"),
        ("[]", "empty"),
        ("[9]", "choose counts from 2 to 6"),
        ('{"layers": [6], "warmup_layers": 7}', "t.json: warmup_layers 7: the model has 6 layers; choose 0..6"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_bad_table_is_reported_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    _refused(ScheduleRequest(name=f"table:{path}"), says)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (ScheduleRequest(name="wibble"), "choose one of linear, full"),
        (ScheduleRequest(name="table"), "choose one of linear, full"),
        (ScheduleRequest(name="table:/nowhere.json"), "cannot be read"),
        (ScheduleRequest(max_layers=3, min_layers=5), "lower --min-layers or raise --max-layers"),
        (ScheduleRequest(max_layers=7), "--max-layers 7"),
        (ScheduleRequest(min_layers=1), "--min-layers 1"),
        (ScheduleRequest(warmup_layers=7), "choose 0..5, or 6 for early exit"),
        (ScheduleRequest(speedup=9), "nearest that can is --speedup 3"),
        (ScheduleRequest(speedup=0.5), "nearest that can is --speedup 1"),
        (ScheduleRequest(speedup=float("nan")), "nearest that can is"),
        (ScheduleRequest(alpha=0.9), "only with --schedule power"),
        (ScheduleRequest(name="power", alpha=1.5), "decay in"),
        (ScheduleRequest(speedup=3, max_layers=6, min_layers=2), "with the given ends; the nearest that can is --speedup 1.5"),
        (ScheduleRequest(span=0), "--span 0"),
        (ScheduleRequest(span=2_000_000_000), "--span 2000000000 is longer than any row; choose --span 1048576 or less"),
        (ScheduleRequest(max_variants=0), "--max-variants 0"),
    ],
)
def test_impossible_requests_are_refused_with_what_to_do(request_: ScheduleRequest, says: str) -> None:
    _refused(request_, says)


def _refused(request_: ScheduleRequest, says: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(says)) as caught:
        build_schedule(request_, 6)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value), "the error ends with what to do"
