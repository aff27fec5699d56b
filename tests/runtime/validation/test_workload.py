"""A workload's figures, on a clock that only the passes move."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from skipdecode.errors import CapacityError
from skipdecode.schedule import Anchor, Schedule
from skipdecode.validation import workload
from skipdecode.validation.workload import Request, check_fits, measure_workload

OWN = Schedule(name="table", num_layers=4, warmup_layers=1, layers=(4, 4, 4, 4, 4, 2, 2, 2))
BYTES: Any = SimpleNamespace(of=lambda layers, batch, context: 100 * layers + batch * context)


class Paced:
    """A generator: a prompt takes 10 s, a token 2 s at full depth and 1 s with the schedule. The first run takes far longer."""

    def __init__(self, own: Schedule) -> None:
        self.manifest = SimpleNamespace(schedule=own, model=SimpleNamespace(vocab_size=9), limits=SimpleNamespace(max_length=48))
        self.engines = SimpleNamespace(turn_around=None)
        self.now = 0.0
        self._warm: set[str] = set()

    def stream(self, rows: list[Any], *, max_new_tokens: int, schedule: Schedule, **_: Any) -> Iterator[None]:
        cold = 0 if schedule.name in self._warm else 1000
        self._warm.add(schedule.name)
        for token in range(max_new_tokens):
            self.now += cold + (10 if token == 0 else 2 if schedule.name == "full" else 1)
            yield


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Any:
    generator = Paced(OWN)
    monkeypatch.setattr(workload, "time", SimpleNamespace(perf_counter=lambda: generator.now))
    return generator


def test_figures_are_taken_from_the_clock_after_the_warm_up(paced: Any) -> None:
    requests = [Request(prompt_tokens=4, new_tokens=5), Request(prompt_tokens=4, new_tokens=3)]
    load = measure_workload(paced, BYTES, requests, batch=2)
    for name, token, total in (("own", 1.0, 14.0), ("full", 2.0, 18.0)):
        assert load[name]["ttft_ms"]["median"] == 10_000
        assert load[name]["token_ms"]["median"] == load[name]["token_ms"]["p99"] == 1e3 * token
        assert load[name]["tokens_per_s"]["median"] == 8 / total
    assert load["decode_gain"]["median"] == 2
    assert load["end_to_end_gain"]["median"] == 18 / 14


@pytest.mark.parametrize(("anchor", "counts"), [(Anchor.GENERATED, [4, 4, 4, 4, 4, 2]), (Anchor.ABSOLUTE, [4, 2, 2, 2, 2, 2])])
def test_a_positions_layers_and_promise_follow_the_schedules_anchor(anchor: Anchor, counts: list[int], paced: Any) -> None:
    paced.manifest.schedule = Schedule(name="table", num_layers=4, warmup_layers=1, layers=OWN.layers, anchor=anchor)
    load = measure_workload(paced, BYTES, [Request(prompt_tokens=4, new_tokens=7)], batch=1)
    assert [row["layers"] for row in load["positions"]] == counts
    for t, row in enumerate(load["positions"]):
        assert (row["position"], row["ms"], row["full_ms"]) == (t, 1000, 2000)
        assert row["promised_ms"] == pytest.approx(2000 * (100 * row["layers"] + 5 + t) / (400 + 5 + t))


def test_a_run_may_fill_the_bundles_length(paced: Any) -> None:
    check_fits([Request(prompt_tokens=40, new_tokens=8)], 1, paced, "--workload")
    with pytest.raises(CapacityError, match="40 prompt tokens and 9 new ones exceed the bundle's 48"):
        check_fits([Request(prompt_tokens=40, new_tokens=9)], 1, paced, "--workload")


@pytest.mark.parametrize("prompts", [(6, 1), (1, 6)])
def test_with_prompts_of_several_lengths_the_deepest_row_counts_in_any_order(prompts: tuple[int, int], paced: Any) -> None:
    paced.manifest.schedule = Schedule(name="table", num_layers=4, warmup_layers=1, layers=OWN.layers, anchor=Anchor.ABSOLUTE)
    by_layer: Any = SimpleNamespace(of=lambda layers, batch, context: 100 * layers + layers * batch * context)
    load = measure_workload(paced, by_layer, [Request(prompt_tokens=prompt, new_tokens=3) for prompt in prompts], batch=2)
    assert [row["layers"] for row in load["positions"]] == [4, 4]
    for t, row in enumerate(load["positions"]):  # the longer prompt is past the schedule's end: its row has 2 layers
        read, whole = 400 + 4 * (2 + t) + 2 * (7 + t), 400 + 4 * (2 + t) + 4 * (7 + t)
        assert row["promised_ms"] == pytest.approx(2000 * read / whole)


def test_a_smaller_last_batch_does_not_run(paced: Any) -> None:
    rows: list[int] = []
    stream = paced.stream
    paced.stream = lambda prompts, **given: rows.append(len(prompts)) or stream(prompts, **given)
    load = measure_workload(paced, BYTES, [Request(prompt_tokens=4, new_tokens=3)] * 5, batch=2)
    assert set(rows) == {2}
    assert load["requests"] == 4


def test_a_batch_that_the_requests_do_not_fill_is_refused(paced: Any) -> None:
    two = [Request(prompt_tokens=4, new_tokens=3)] * 2
    check_fits(two, 2, paced, "--workload")
    with pytest.raises(CapacityError) as caught:
        check_fits(two, 3, paced, "--workload")
    says = "--workload: a batch of 3 needs as many requests, but the file has 2; choose --batch 2 or less, or add requests"
    assert str(caught.value) == says


def test_requests_are_refused_if_those_that_run_have_no_decode_step(paced: Any) -> None:
    """An objective for the time per token would have no figure."""
    first, last = [Request(prompt_tokens=4, new_tokens=1)] * 2, Request(prompt_tokens=4, new_tokens=2)
    check_fits([last, *first], 2, paced, "--workload")
    check_fits([*first, first[0]], 2, paced, "--workload")
    with pytest.raises(CapacityError, match="they do not run because they do not fill a batch of 2; put them first"):
        check_fits([*first, last], 2, paced, "--workload")


def test_a_request_that_does_not_run_may_be_too_long(paced: Any) -> None:
    requests = [Request(prompt_tokens=4, new_tokens=3)] * 2 + [Request(prompt_tokens=90, new_tokens=3)]
    check_fits(requests, 2, paced, "--workload")
