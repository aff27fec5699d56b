"""Decode steps that follow each other on a device: tokens are chosen there, and the host looks at them a few steps later.

A step is the route's engines and the turn-around (plugins/turnaround), which makes the next step's inputs and writes the tokens
where the host reads them. The first time a route is taken, its calls are made one by one. From the second time on they are one
captured graph, launched once per step. If a capture fails, the loop logs a warning and goes on with calls, which give the same
tokens.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from skipdecode import bindings
from skipdecode.decoder import Decoder, Route
from skipdecode.device import Call, HostArray
from skipdecode.errors import CapacityError
from skipdecode.memory import DeviceArray, DeviceMemory, IntArray
from skipdecode.sampling import Sampling
from skipdecode.turn_around import SkdSampling, SkdTurnaround, TurnAround

STEPS_AHEAD = 4  # steps enqueued while the host waits for the tokens of the one before them
_NO_TOKEN = -1

logger = logging.getLogger(__name__)


class DeviceLoop:
    """The steps of one decoder, for any number of generations of its rows.

    Args:
        turn_around: runs on the device that holds the decoder's memory.
        stop_count: the largest number of token ids that end a row.
        max_steps: the largest number of tokens per row in a generation.
        graphs: whether to capture routes.
    """

    def __init__(self, decoder: Decoder, turn_around: TurnAround, *, stop_count: int, max_steps: int, graphs: bool) -> None:
        assert isinstance(decoder.memory, DeviceMemory)
        self.decoder, self.max_steps = decoder, max_steps
        self._turn_around, self._may_capture, self._device = turn_around, graphs, decoder.memory.device
        rows = len(decoder.kv.lengths)
        self._row_ids: IntArray = np.zeros(rows, dtype=np.int64)
        self._stop_ids: IntArray = np.zeros(stop_count, dtype=np.int64)
        self._sampling = np.zeros((rows, ctypes.sizeof(SkdSampling)), dtype=np.uint8)
        counters = [np.zeros(rows, dtype=np.int32) for _ in range(2)]
        arrays: list[HostArray] = [self._row_ids, self._stop_ids, self._sampling, *counters]
        twins = [decoder.memory.twin(array) for array in arrays]
        self._sends = [send for _, send in twins]
        # kept alive: the state has only their addresses
        row_ids, stop_ids, sampling, steps, finished = self._arrays = [twin for twin, _ in twins]
        self._tokens = self._device.mirror((max_steps, rows), np.int64)
        self._state = SkdTurnaround(
            rows=rows, vocabulary=decoder.logits.shape[1], kept_steps=max_steps, stop_count=stop_count,
            logits=_pointer(decoder, bindings.LOGITS), sampling=sampling.pointer, row_ids=row_ids.pointer,
            stop_ids=stop_ids.pointer, steps=steps.pointer, input_ids=_pointer(decoder, bindings.INPUT_IDS),
            seqlens_k=_pointer(decoder, bindings.SEQLENS_K), position_ids=_pointer(decoder, bindings.POSITION_IDS),
            finished=finished.pointer, tokens=self._tokens.ctypes.data,
        )  # fmt: skip
        self._routes_run: WeakSet[Route] = WeakSet()
        self._graphs: WeakKeyDictionary[Route, Call] = WeakKeyDictionary()
        self._generations = 0  # how many have begun

    def tokens(
        self, prompts: Sequence[Sequence[int]], new: int, sampling: Sampling, row_ids: IntArray, stop_ids: Sequence[int]
    ) -> Iterator[tuple[list[int], int | None]]:
        """Yield each step's tokens, one per row, and its layer count; first the prefill's, whose count is None.

        A row that has ended repeats its stop id.

        Args:
            prompts: as in `Decoder.prefill`.
            new: tokens per row, at most `max_steps`.
            row_ids: [B] int64, the user's row numbers.
            stop_ids: token ids that end a row, at most `stop_count`.

        Raises:
            CapacityError: another generation has begun meanwhile and taken over the buffers.
        """
        self.begin(prompts, sampling, row_ids, stop_ids)
        generation = self._generations
        pending: deque[tuple[int | None, Call]] = deque([(None, self._device.mark())])
        for step in range(new):
            if generation != self._generations:
                raise CapacityError(
                    "another generation has started on the same buffers", "finish one before the next, or load twice"
                )
            while len(pending) <= STEPS_AHEAD and step + len(pending) < new:
                pending.append((self.step(), self._device.mark()))
            layers, wait = pending.popleft()
            wait()
            yield self._tokens[step].tolist(), layers

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling, row_ids: IntArray, stop_ids: Sequence[int]) -> None:
        """Enqueue the prefill and the choice of its tokens on the device's stream; arguments as in `tokens`."""
        self._generations += 1
        self._row_ids[:] = row_ids
        self._stop_ids[:] = [*stop_ids, *[_NO_TOKEN] * (len(self._stop_ids) - len(stop_ids))]
        self._sampling[:] = np.frombuffer(bytes(SkdSampling.of(sampling)), dtype=np.uint8)
        for send in self._sends:  # also resets the counters, which are zero on the host
            send()
        self.decoder.enqueue_prefill(prompts)
        self.decoder.send_positions(self.decoder.kv.lengths - 1)  # the turn-around adds one
        self._turn_around(self._state)

    def step(self) -> int:
        """Enqueue the next step on the device's stream; returns how many layers its deepest row computes."""
        route = self.decoder.route()
        graph = self._graphs.get(route)
        if graph is None and self._may_capture and route in self._routes_run:
            # not the first time, when engines allocate memory and choose kernels: a capture does not allow that
            graph = self._capture_route(route)
        if graph is None:
            self._run(route.calls)
            self._routes_run.add(route)
        else:
            graph()
        self.decoder.advance()
        return route.deepest

    @property
    def graphs(self) -> int:
        """How many routes have been captured so far."""
        return len(self._graphs)

    def rewind(self, position: int, length: int) -> None:
        """Make the next step the one at `position`, on rows of `length` valid tokens, to measure steps repeatedly."""
        for send in self._sends:  # resets the counters, which are zero on the host
            send()
        self.decoder.rewind(position, length)
        self.decoder.send_positions(self.decoder.kv.lengths)

    def wait(self) -> None:
        """Wait for everything enqueued on the device's stream."""
        self._device.mark()()

    def _capture_route(self, route: Route) -> Call | None:
        """Capture the route as a graph; None if that failed, after which no other capture is tried."""
        calls = route.calls  # not `route` itself: a graph that referred to it would keep its own weak key alive
        try:
            self._graphs[route] = self._device.capture(lambda: self._run(calls))
        except Exception as error:  # a capture runs nothing: whatever broke it, the same calls can still be made
            self._may_capture = False
            logger.warning("decode steps continue without CUDA graphs: %s", error)
        return self._graphs.get(route)

    def _run(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call()
        self._turn_around(self._state)


def _pointer(decoder: Decoder, name: str) -> int:
    array = decoder.bound[name]
    assert isinstance(array, DeviceArray)
    return array.pointer
