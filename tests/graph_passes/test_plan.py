"""Schedule -> variants and segments."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from skipdecode.graph_passes.plan import Plan, plan_variants
from skipdecode.schedule import Schedule, active_layers
from tests.runtime.test_schedule import schedules


@given(schedules(), st.none() | st.integers(1, 5))
def test_segments_partition_the_layers_and_variants_climb_exactly_their_own_layers(schedule: Schedule, limit: int | None) -> None:
    plan = plan_variants(schedule, max_layers_per_segment=limit)
    assert [layer for segment in plan.segments for layer in segment] == list(range(schedule.num_layers))
    assert {schedule.num_layers, *schedule.variants} == {count for count, _ in plan.variants}
    for count, indices in plan.variants:
        climbed = tuple(layer for index in indices for layer in plan.segments[index])
        assert climbed == active_layers(schedule.num_layers, schedule.warmup_layers, count)
    if limit:
        assert max(map(len, plan.segments)) <= limit


@given(schedules())
def test_segments_are_maximal_so_neighbours_differ_in_some_variant(schedule: Schedule) -> None:
    plan = plan_variants(schedule)
    users = _users(plan)
    assert all(left != right for left, right in itertools.pairwise(users))


@given(schedules(), st.integers(1, 5))
def test_a_segment_is_cut_only_where_variants_differ_or_where_it_is_full(schedule: Schedule, limit: int) -> None:
    plan = plan_variants(schedule, max_layers_per_segment=limit)
    for segment, (left, right) in zip(plan.segments, itertools.pairwise(_users(plan)), strict=False):
        assert left != right or len(segment) == limit


@given(schedules(), st.integers(0, 12), st.none() | st.integers(1, 5))
def test_a_border_is_cut_and_no_other_cut_changes(schedule: Schedule, border: int, limit: int | None) -> None:
    plan = plan_variants(schedule, max_layers_per_segment=limit, prompt_border=border)
    firsts = {segment[0] for segment in plan.segments}
    assert border in firsts or border >= schedule.num_layers
    if limit is None:
        assert firsts == {segment[0] for segment in plan_variants(schedule).segments} | ({border} & {*range(schedule.num_layers)})


@given(schedules())
def test_each_variant_comes_once_full_depth_first(schedule: Schedule) -> None:
    counts = [count for count, _ in plan_variants(schedule).variants]
    assert counts[0] == schedule.num_layers
    assert counts == sorted(set(counts), reverse=True)


def _users(plan: Plan) -> list[set[int]]:
    """The variants, by layer count, that climb each segment."""
    return [{count for count, indices in plan.variants if index in indices} for index in range(len(plan.segments))]
