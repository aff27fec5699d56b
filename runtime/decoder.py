"""Prefill and decode step: the climb through the segments, each row computing exactly its own layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skipdecode import bindings as names
from skipdecode.engines.ort import OrtEngine
from skipdecode.kv_buffer import FloatArray, IntArray, KVBuffer, slots_per_layer
from skipdecode.manifest import Model
from skipdecode.memory import Array, Memory
from skipdecode.schedule import Anchor, Schedule

PREFILL_CHUNK = 512  # prompt tokens a pass, unless told otherwise: bounds the attention scores to chunk x prompt
_PADDING = 4  # tokens that a row may be padded by: a pass of its own costs as much as 3 (int4) to 10 (fp32) tokens on 2 cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The loaded engines of one target."""

    embed: OrtEngine
    segments: tuple[tuple[tuple[int, ...], OrtEngine], ...]  # (layers, engine), lowest first
    head: OrtEngine
    memory: Memory  # what they read and write


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """What one step climbs."""

    climbs: tuple[Callable[[], None], ...]  # segments on their rows, lowest first
    deepest: int  # layers that the deepest row computes


class Decoder:
    """One batch on its way: engines bound to one KV buffer.

    Rows must come longest prompt first, so that the rows active in any segment are a suffix of the batch (fewest active
    layers first); a segment then runs on that suffix alone.

    Args:
        prompt_lengths: tokens of each row's prompt, never rising.
        new: decode steps there is room for.
        prefill_chunk: prompt tokens a pass.
    """

    def __init__(
        self,
        engines: Engines,
        model: Model,
        schedule: Schedule,
        prompt_lengths: Sequence[int],
        new: int,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        assert list(prompt_lengths) == sorted(prompt_lengths, reverse=True)
        rows = len(prompt_lengths)
        self.schedule = schedule
        self.memory = memory = engines.memory
        self.kv = KVBuffer(model, rows, slots_per_layer(schedule, max(prompt_lengths), new), memory)
        self.logits: FloatArray = np.zeros((rows, model.vocab_size), dtype=np.float32)
        self._engines, self._model, self._prefill_chunk = engines, model, prefill_chunk
        self._step = 0
        self._needed = [schedule.least_count(layers[0]) for layers, _ in engines.segments]
        self._ids: IntArray = np.zeros((rows, 1), dtype=np.int64)
        self._positions: IntArray = np.zeros((rows, 1), dtype=np.int64)
        self._seqlens_k = np.zeros(rows, dtype=np.int32)
        self._totals = np.zeros(rows, dtype=np.int32)
        self._hidden = memory.floats((rows, 1, model.hidden_size))
        ids, send_ids = memory.twin(self._ids)
        self._bound_positions, send_positions = memory.twin(self._positions)
        self._bound_seqlens_k, send_seqlens_k = memory.twin(self._seqlens_k)
        self._sends = [send for send in (send_ids, send_positions, send_seqlens_k) if send is not None]
        self._last, _ = memory.twin(np.zeros(rows, dtype=np.int64))
        self._bound_logits, self._receive = memory.result(self.logits)
        self._embed = engines.embed.bind(
            {names.INPUT_IDS: ids, names.POSITION_IDS: self._bound_positions}, {names.HIDDEN: self._hidden}
        )
        self._head = engines.head.bind({names.HIDDEN: self._hidden, names.LAST: self._last}, {names.LOGITS: self._bound_logits})
        self._climbs: dict[tuple[int, int], Callable[[], None]] = {}
        self._routes: dict[int | bytes, _Route] = {}

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run every row's prompt: its keys and values are in the KV buffer then, and the next tokens' logits in `logits`.

        Short prompts of about the same length share a pass, because a pass reads the weights once. A long one goes in chunks,
        so that activations do not grow with P x P.

        Args:
            prompts: token ids of each row, of the lengths that the decoder was made for.
        """
        lengths = [len(prompt) for prompt in prompts]
        for rows in _passes(lengths, self._prefill_chunk if self._prefills_whole(lengths[0]) else 1):
            self._prefill_rows(rows, prompts[rows])
        if self._receive is not None:
            self._receive()
        self.kv.lengths[:] = lengths

    def decode_step(self, tokens: IntArray) -> int:
        """Feed one token [B] int64 a row; the next tokens' logits are in `logits` [B,V] float32.

        Returns:
            How many layers the deepest row computed.
        """
        route = self._route()
        self._ids[:, 0] = tokens
        self._positions[:, 0] = self._seqlens_k[:] = self.kv.lengths
        self._totals[:] = self.kv.lengths + 1
        for send in self._sends:
            send()
        self._embed()
        for climb in route.climbs:
            climb()
        self._head()
        if self._receive is not None:
            self._receive()
        self.kv.lengths += 1
        self._step += 1
        return route.deepest

    def rewind(self, position: int, length: int) -> None:
        """Make the next decode step the one at `position`, on rows of `length` valid tokens: for measuring one step again."""
        self._step = position
        self.kv.lengths[:] = length

    def _route(self) -> _Route:
        """This step's route, found once for each combination of layer counts (a search a segment and step took half the loop)."""
        if self.schedule.anchor is Anchor.GENERATED:
            count = self.schedule.layers_at(self._step)
            return self._routes.get(count) or self._new_route(count, np.full(len(self._ids), count))
        counts = np.array([self.schedule.layers_at(length) for length in self.kv.lengths.tolist()])
        key = counts.tobytes()
        return self._routes.get(key) or self._new_route(key, counts)

    def _new_route(self, key: int | bytes, counts: IntArray) -> _Route:
        """`counts` [B]: how many layers each row computes in this step, never falling from row to row."""
        starts = np.searchsorted(counts, self._needed).tolist()
        climbs = tuple(self._climb(index, start) for index, start in enumerate(starts) if start < len(counts))
        self._routes[key] = _Route(climbs=climbs, deepest=int(counts[-1]))
        return self._routes[key]

    def _prefilled_positions(self, layer: int, length: int) -> int:
        """How many of a prompt's `length` positions compute `layer`."""
        cap = self.schedule.cap(layer) if self.schedule.anchor is Anchor.ABSOLUTE else None
        return length if cap is None else min(cap, length)

    def _prefills_whole(self, length: int) -> bool:
        """Whether every layer computes all of a prompt's `length` positions, so that rows can lie one after another."""
        return all(self._prefilled_positions(layers[0], length) == length for layers, _ in self._engines.segments)

    def _prefill_rows(self, rows: slice, prompts: Sequence[Sequence[int]]) -> None:
        """One pass over some rows' prompts, padded to the longest, which is the first; one row alone goes in chunks."""
        count, length, width, memory = len(prompts), len(prompts[0]), self._model.hidden_size, self.memory
        padded: IntArray = np.zeros((count, length), dtype=np.int64)
        for line, prompt in zip(padded, prompts, strict=True):
            line[: len(prompt)] = prompt
        last: IntArray = np.array([len(prompt) - 1 for prompt in prompts])
        ids, positions, bound_last = (memory.twin(array)[0] for array in (padded, np.tile(np.arange(length), (count, 1)), last))
        hidden = memory.floats((count * length, width))
        whole = hidden.reshape(count, length, width)
        self._engines.embed.bind({names.INPUT_IDS: ids, names.POSITION_IDS: positions}, {names.HIDDEN: whole})()
        for index, (layers, _) in enumerate(self._engines.segments):
            computed = count * self._prefilled_positions(layers[0], length)
            self._prefill_segment(index, rows, hidden[:computed], positions.reshape(count * length)[:computed], last)
        top = {names.HIDDEN: whole, names.LAST: bound_last}
        self._engines.head.bind(top, {names.LOGITS: self._bound_logits[rows]})()

    def _prefill_segment(self, index: int, rows: slice, hidden: Any, positions: Any, last: IntArray) -> None:
        """Segment `index` on the prompts of B rows: `hidden` [B*S,H] in place, `positions` [B*S], `last` [B] of valid ones."""
        layers, engine = self._engines.segments[index]
        memory, model, count = self.memory, self._model, len(last)
        length = hidden.shape[0] // count
        shape = (count, model.num_kv_heads, length, model.head_size)
        # a layer that no decode step computes has no slots: its prompt's keys and values live for this call only
        buffers = [
            self.kv.rows(layer, rows) if self.kv.has(layer) else (memory.floats(shape), memory.floats(shape)) for layer in layers
        ]
        step = length if count > 1 else self._prefill_chunk
        for start in range(0, length, step):
            stop = min(start + step, length)
            part = hidden[count * start : count * stop].reshape(count, stop - start, model.hidden_size)
            seqlens_k, _ = memory.twin(np.minimum(last, stop - 1).astype(np.int32))
            inputs: dict[str, Array] = {
                names.HIDDEN: part,
                names.POSITION_IDS: positions[count * start : count * stop].reshape(count, stop - start),
                names.SEQLENS_K: seqlens_k,
                names.TOTAL_SEQUENCE_LENGTH: np.array([stop], dtype=np.int32),
            }
            _bind_segment(engine, layers, inputs, part, buffers)()

    def _climb(self, index: int, start: int) -> Callable[[], None]:
        """Segment `index` on rows `start ..`, bound when first needed."""
        if (index, start) not in self._climbs:
            layers, engine = self._engines.segments[index]
            hidden = self._hidden[start:]
            inputs: dict[str, Array] = {
                names.HIDDEN: hidden,
                names.POSITION_IDS: self._bound_positions[start:],
                names.SEQLENS_K: self._bound_seqlens_k[start:],
                names.TOTAL_SEQUENCE_LENGTH: self._totals[start : start + 1],  # of the suffix's longest row; always on the host
            }
            buffers = [self.kv.rows(layer, slice(start, None)) for layer in layers]
            self._climbs[index, start] = _bind_segment(engine, layers, inputs, hidden, buffers)
        return self._climbs[index, start]


def _passes(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Rows, longest first, whose prompts share a pass of at most `most` tokens; a longer one is alone."""
    first = 0
    for row, length in enumerate(lengths):
        longest = lengths[first]
        if row > first and ((row - first + 1) * longest > most or longest - length > _PADDING):
            yield slice(first, row)
            first = row
    yield slice(first, len(lengths))


def _bind_segment(
    engine: OrtEngine,
    layers: tuple[int, ...],
    inputs: Mapping[str, Array],
    hidden: Array,
    buffers: Sequence[tuple[Array, Array]],
) -> Callable[[], None]:
    """Bind a segment; hidden state and KV buffer are read and written in place."""
    bound: dict[str, Array] = dict(inputs)
    outputs: dict[str, Array] = {names.HIDDEN_OUT: hidden}
    for layer, (key, value) in zip(layers, buffers, strict=True):
        for past, present, array in ((names.PAST_KEY, names.PRESENT_KEY, key), (names.PAST_VALUE, names.PRESENT_VALUE, value)):
            bound[names.of_layer(past, layer)] = array
            outputs[names.of_layer(present, layer)] = array
    return engine.bind(bound, outputs)
