"""The loop that runs on the device, here on the CPU in place of a GPU, gives the same results as the loop on the host."""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skipdecode import decoder
from skipdecode.device import Call, HostDevice
from skipdecode.device_loop import STEPS_AHEAD, DeviceLoop
from skipdecode.errors import CapacityError
from skipdecode.generate import Generator
from skipdecode.generation import Generation, Row, Step
from skipdecode.sampling import Sampling
from skipdecode.schedule import Anchor, Schedule, full_depth
from tests.agreement import spoil
from tests.models import LAYERS, VOCABULARY
from tests.runtime import device

PROMPTS = [[5, 6], [9, 8, 7, 6, 5, 4, 3], [11, 4, 50]]
NEW = 14
Load = Callable[[bool], Generator]


@pytest.fixture(params=Anchor, ids=str)
def anchor(request: pytest.FixtureRequest) -> Anchor:
    chosen: Anchor = request.param
    return chosen


@pytest.fixture(params=["cuda", "tensorrt-rtx"])
def load(
    anchor: Anchor, gpu_bundle: Callable[[Anchor], Path], turnaround_library: ctypes.CDLL, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Load:  # fmt: skip
    """Load the bundle, with tokens chosen on the device or on the host."""
    run = device.turn_around(turnaround_library)
    return lambda there: device.load(gpu_bundle(anchor), request.param, run if there else None, monkeypatch)


def _ids(generation: Generation) -> list[list[int]]:
    return [row.token_ids for row in generation.sequences]


@pytest.mark.parametrize(
    "how", [{}, {"do_sample": True, "seed": 3}, {"do_sample": True, "top_k": 20, "top_p": 0.9, "seed": 4}], ids=str
)
def test_it_gives_the_same_tokens_and_layers_as_the_host_loop(how: dict[str, Any], load: Load) -> None:
    given = {"max_new_tokens": NEW, "ignore_eos": True, **how}
    host = load(False).generate(PROMPTS, **given)
    generator = load(True)
    for _ in range(2):  # the second time with what the first run captured
        there = generator.generate(PROMPTS, **given)
        assert _ids(there) == _ids(host) and there.layers == host.layers
        assert len({tuple(ids) for ids in _ids(there)}) == len(PROMPTS)
        assert 0 < there.timings.prefill_s < there.timings.prefill_s + there.timings.decode_s


def test_routes_that_are_evicted_take_their_graphs_with_them(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
    host, generator = load(False).generate(PROMPTS, **given), load(True)
    monkeypatch.setattr(decoder, "MAX_ROUTES", 2)
    for _ in range(3):
        assert _ids(generator.generate(PROMPTS, **given)) == _ids(host)
    assert generator._kept_loop is not None and 0 < generator._kept_loop.graphs <= 2


def test_a_row_ends_at_its_stop_token_and_the_run_with_the_last_row(load: Load) -> None:
    generator, host = load(True), load(False)
    whole = _ids(host.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True))
    another = next(token for token in range(VOCABULARY) if token not in whole[0])
    model = dataclasses.replace(generator.manifest.model, eos_token_ids=(another, whole[0][5]))
    for each in (generator, host):
        each.manifest = dataclasses.replace(each.manifest, model=model)
    first, second = (each.generate(PROMPTS, max_new_tokens=NEW) for each in (generator, host))
    assert _ids(first) == _ids(second) and first.layers == second.layers
    ended = first.sequences[0]
    assert ended.finish_reason == "stop" and ended.token_ids == whole[0][: whole[0].index(whole[0][5]) + 1]
    alone = generator.generate(PROMPTS[0], max_new_tokens=NEW)
    assert len(alone.layers) == len(ended.token_ids) - 1, "steps that were under way are not reported"


@pytest.mark.parametrize("anchor", [Anchor.GENERATED], indirect=True)
def test_where_the_host_chooses_tokens_rows_that_have_ended_stay_in_a_devices_batch(load: Load) -> None:
    """With a trace it does; moving keys and values is for host memory only."""
    host = load(False)
    whole = _ids(host.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True))
    stops = (whole[0][3], whole[1][5])
    host.manifest = dataclasses.replace(host.manifest, model=dataclasses.replace(host.manifest.model, eos_token_ids=stops))
    wanted = [ids[: next((at + 1 for at, token in enumerate(ids) if token in stops), NEW)] for ids in whole]
    assert sum(len(ids) < NEW for ids in wanted) >= 2
    assert _ids(host.generate(PROMPTS, max_new_tokens=NEW)) == wanted


@pytest.mark.parametrize("anchor", [Anchor.GENERATED], indirect=True)
def test_token_0_ends_no_row_where_no_token_is_to_end_it(load: Load) -> None:
    """The device has places for all ids that end rows, even in a run that uses none of them."""
    host = load(False)
    seeds = ({"max_new_tokens": NEW, "ignore_eos": True, "do_sample": True, "temperature": 99.0, "seed": n} for n in range(40))
    given = next(each for each in seeds if any(0 in ids[:-1] for ids in _ids(host.generate(PROMPTS, **each))))
    assert _ids(load(True).generate(PROMPTS, **given)) == _ids(host.generate(PROMPTS, **given))


@pytest.mark.parametrize("anchor", [Anchor.GENERATED], indirect=True)
def test_a_token_arrives_while_the_next_steps_are_under_way(load: Load) -> None:
    loop = load(True).device_loop([2], NEW, full_depth(LAYERS))
    under_way = []
    for step, _ in enumerate(loop.tokens([PROMPTS[0]], NEW, Sampling(), np.arange(1), ())):
        under_way.append(int(loop.decoder.kv.lengths[0]) - len(PROMPTS[0]) - step)
    assert under_way == [STEPS_AHEAD] * (NEW - STEPS_AHEAD) + list(range(STEPS_AHEAD))[::-1]


@pytest.mark.parametrize("anchor", [Anchor.GENERATED], indirect=True)
@pytest.mark.parametrize("captures", [0, 1])
def test_after_a_failed_capture_the_loop_goes_on_with_calls_and_warns_once(
    captures: int, load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"max_new_tokens": NEW, "ignore_eos": True}
    expected, generator, left = _ids(load(False).generate(PROMPTS, **given)), load(True), [None] * captures

    def capture(self: HostDevice, calls: Call) -> Call:
        if not left:
            raise RuntimeError("no such node")
        left.pop()
        return calls

    monkeypatch.setattr(HostDevice, "capture", capture)
    for _ in range(3):
        assert _ids(generator.generate(PROMPTS, **given)) == expected
    assert generator._kept_loop is not None and generator._kept_loop.graphs == captures
    assert caplog.messages == ["decode steps continue without CUDA graphs: no such node"]


@pytest.mark.parametrize("anchor", [Anchor.GENERATED], indirect=True)
def test_steps_can_be_measured_again_at_any_position(load: Load) -> None:
    loop = load(True).device_loop([2], NEW + 5, full_depth(LAYERS))

    def chosen() -> list[int]:
        return [int(tokens[0]) for tokens, _ in loop.tokens([PROMPTS[0]], NEW, Sampling(), np.arange(1), ())]

    first = chosen()
    loop._tokens[:] = -1
    loop.rewind(3, 5)
    for _ in range(4):
        assert loop.step() == LAYERS
    loop.wait()
    assert loop.decoder.kv.lengths.tolist() == [9]
    assert [token >= 0 for token in loop._tokens[:, 0]] == [True] * 4 + [False] * (NEW + 1), "steps are counted from 0 again"
    assert chosen() == first


@pytest.mark.parametrize("anchor", [Anchor.GENERATED], indirect=True)
def test_buffers_and_graphs_are_kept_for_requests_that_fit(load: Load) -> None:
    generator = load(True)

    def loop() -> object:
        return generator._kept_loop

    expected = [_ids(load(False).generate(prompts, max_new_tokens=NEW, ignore_eos=True)) for prompts in (PROMPTS, PROMPTS[:2])]
    assert _ids(generator.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)) == expected[0]
    kept = loop()
    shorter = generator.generate([prompt[:2] for prompt in PROMPTS], max_new_tokens=3, do_sample=True, seed=1)
    assert loop() is kept and len(shorter.layers) == 2
    assert _ids(generator.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)) == expected[0]
    assert loop() is kept
    assert _ids(generator.generate(PROMPTS[:2], max_new_tokens=NEW, ignore_eos=True)) == expected[1]
    fewer_rows = loop()
    assert fewer_rows is not kept
    generator.generate(PROMPTS[:2], max_new_tokens=NEW + 1, schedule="full")
    assert loop() is not fewer_rows


@pytest.mark.parametrize("anchor", [Anchor.GENERATED], indirect=True)
def test_a_request_for_more_tokens_than_the_kept_loop_takes_replaces_the_loop(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept loop's KV buffer, made for longer prompts, would have room."""
    expected, generator = _ids(load(False).generate(PROMPTS[::2], max_new_tokens=NEW, ignore_eos=True)), load(True)
    generator.generate([[7] * (NEW + 2)] * 2, max_new_tokens=2)
    kept, make, seen = weakref.ref(generator._kept_loop), generator.device_loop, []

    def made(*given: Any) -> DeviceLoop:
        seen.append(kept())
        return make(*given)

    monkeypatch.setattr(DeviceLoop, "wait", lambda _: seen.append("steps under way have ended"))
    monkeypatch.setattr(generator, "device_loop", made)
    assert _ids(generator.generate(PROMPTS[::2], max_new_tokens=NEW, ignore_eos=True)) == expected
    assert seen == ["steps under way have ended", None], "then the old loop's memory is free before more is taken"


def test_another_schedule_or_longer_prompts_replace_the_loop(load: Load, anchor: Anchor) -> None:
    host, generator = load(False), load(True)
    few = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=(2,), anchor=anchor)
    longer = [[*prompt, *range(20, 32)] for prompt in PROMPTS]
    for prompts, schedule in ((PROMPTS, None), (PROMPTS, few), (PROMPTS, None), (longer, None)):
        given: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True, "schedule": schedule}
        there, here = generator.generate(prompts, **given), host.generate(prompts, **given)
        assert (_ids(there), there.layers) == (_ids(here), here.layers)


def test_what_an_earlier_run_left_in_the_kv_buffer_does_no_harm(load: Load) -> None:
    """TensorRT's attention weighs every slot, and 0 x NaN is NaN, so one overflow would spoil every later run."""
    generator = load(True)
    first = generator.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
    kept = generator._kept_loop
    spoil(generator)
    assert generator.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True).sequences == first.sequences
    assert generator._kept_loop is kept


def test_a_caller_may_end_rows_between_two_steps_and_the_others_go_on(load: Load) -> None:
    """Steps that are under way by then still compute tokens of the ended row, which nobody gets."""
    generator = load(True)
    whole, rows = _ids(load(False).generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)), [Row(prompt_ids=p) for p in PROMPTS]
    steps = []
    for step in generator.stream(rows, max_new_tokens=NEW, sampling=Sampling(), ignore_eos=True):
        steps.append(step.token_ids)
        if len(steps) == 2:
            rows[1].finish_reason = "a stop string"
        if len(steps) == 5:
            rows[0].finish_reason = rows[2].finish_reason = "the client has left"
    assert [row.token_ids for row in rows] == [whole[0][:5], whole[1][:2], whole[2][:5]]
    assert [step[1] is None for step in steps] == [False] * 2 + [True] * 3
    assert _ids(generator.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)) == whole, "the next run is complete"


@pytest.mark.parametrize("anchor", [Anchor.GENERATED], indirect=True)
def test_a_stream_ends_with_an_error_when_another_has_taken_its_buffers(load: Load) -> None:
    generator = load(True)

    def stream() -> Iterator[Step]:
        return generator.stream([Row(prompt_ids=PROMPTS[0])], max_new_tokens=NEW, sampling=Sampling(), ignore_eos=True)

    first, second = stream(), stream()
    next(first), next(second)
    with pytest.raises(CapacityError, match="another generation has started on the same buffers; finish one before the next"):
        next(first)
    assert len(list(second)) == NEW - 1


@pytest.mark.parametrize("anchor", [Anchor.GENERATED], indirect=True)
@pytest.mark.parametrize("close", [False, True])
def test_an_abandoned_stream_keeps_its_buffers_until_it_is_closed_or_forgotten(
    close: bool, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it can go on beside a generation of other rows."""
    expected, generator = _ids(load(False).generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)), load(True)
    generator._cuda_graphs = False  # a graph of `HostDevice` refers to the loop, so only the garbage collector would free both

    def begin() -> tuple[list[Row], Any, weakref.ref[Any]]:
        rows = [Row(prompt_ids=prompt) for prompt in PROMPTS]
        stream = generator.stream(rows, max_new_tokens=NEW, sampling=Sampling(), ignore_eos=True)
        next(stream)
        return rows, stream, weakref.ref(generator._kept_loop)

    rows, stream, _ = begin()
    generator.generate(PROMPTS[:2], max_new_tokens=NEW)
    assert len(list(stream)) == NEW - 1 and [row.token_ids for row in rows] == expected
    _, stream, loop = begin()
    if close:
        stream.close()
    else:
        del stream
    make, left = generator.device_loop, []

    def made(*given: Any) -> DeviceLoop:
        left.append(loop())
        return make(*given)

    monkeypatch.setattr(generator, "device_loop", made)
    generator.generate(PROMPTS[:2], max_new_tokens=NEW)
    assert left == [None], "its memory is free before more is taken"
