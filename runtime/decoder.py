"""Prefill and decode step: the climb through the segments, each row computing exactly its own layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import ge
from typing import Any

import numpy as np

from skipdecode import bindings as names
from skipdecode.device import Call
from skipdecode.engines import Engine, Engines
from skipdecode.errors import CapacityError
from skipdecode.kv_buffer import FloatArray, IntArray, KVBuffer, layer_state, slots_per_layer
from skipdecode.manifest import Model
from skipdecode.memory import Array, HostMemory
from skipdecode.schedule import Anchor, Schedule

PREFILL_CHUNK = 512  # prompt tokens a pass, unless told otherwise: bounds the attention scores to chunk x prompt
_PADDING = 4  # tokens that a row may be padded by: a pass of its own costs as much as 3 (int4) to 10 (fp32) tokens on 2 cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What one step runs."""

    calls: tuple[Call, ...]  # embedding, segments on their rows, lowest first, head
    deepest: int  # layers that the deepest row computes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Some tokens of a pass over prompts, what engines are told of them."""

    tokens: slice  # of each row
    positions: Array  # [B,S] int64
    seqlens_k: Array  # [B] int32
    total: Array  # [1] int32, on the host


class Decoder:
    """One batch on its way: engines bound to one KV buffer.

    Rows must come longest prompt first, so that the rows active in any segment are a suffix of the batch (fewest active
    layers first); a segment then runs on that suffix alone.

    Args:
        prompt_lengths: tokens of each row's prompt, never rising.
        new: decode steps there is room for.
        prefill_chunk: prompt tokens a pass.

    Attributes:
        logits: [B,V] float32, of the next tokens, on the host.
        bound: ids [B,1], positions [B,1], `seqlens_k` [B] and logits [B,V] as engines see them, by their names in `bindings`.
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
        rows = len(prompt_lengths)
        self.schedule = schedule
        self.memory = memory = engines.memory
        self._engines, self._model = engines, model
        self._prefill_chunk = min(prefill_chunk, engines.most_prompt_tokens or prefill_chunk)
        self.slots = self.slots_for(max(prompt_lengths), new)
        self.kv = KVBuffer(model, rows, self.slots, memory)
        self._length_view = self.kv.lengths.data
        self._step = 0
        self._needed = [schedule.least_count(layers[0]) for layers, _ in engines.segments]
        self._ids: IntArray = np.zeros((rows, 1), dtype=np.int64)
        self._positions: IntArray = np.zeros((rows, 1), dtype=np.int64)
        self._seqlens_k = np.zeros(rows, dtype=np.int32)
        self._totals = np.zeros(rows, dtype=np.int32)
        # a step writes through these: each call of numpy costs 20 us where an engine has emptied the caches
        self._counters = [array.reshape(-1).data for array in (self._positions, self._seqlens_k, self._totals)]
        self._id_view = self._ids.reshape(-1).data
        self._most_totals = [np.array([self.slots[layers[0]]], dtype=np.int32) for layers, _ in engines.segments]
        self._hidden = memory.floats((rows, 1, model.hidden_size))
        self.bound: dict[str, Array] = {}
        self._sends: list[Call] = []
        for name, array in (
            (names.INPUT_IDS, self._ids), (names.POSITION_IDS, self._positions), (names.SEQLENS_K, self._seqlens_k),
        ):  # fmt: skip
            self.bound[name], send = memory.twin(array)
            self._sends += [send] if send is not None else []
        self._last: Array = memory.twin(np.zeros(rows, dtype=np.int64))[0]
        self.logits: FloatArray
        self._receive: Call | None
        self.logits, self.bound[names.LOGITS], self._receive = memory.result((rows, model.vocab_size), np.float32)
        inputs = {name: self.bound[name] for name in (names.INPUT_IDS, names.POSITION_IDS)}
        self._embed = engines.embed.bind(inputs, {names.HIDDEN: self._hidden})
        top = {names.HIDDEN: self._hidden, names.LAST: self._last}
        self._head = engines.head.bind(top, {names.LOGITS: self.bound[names.LOGITS]})
        self._climbs: dict[tuple[int, int], Call] = {}
        self._routes: dict[int | bytes, Route] = {}

    def slots_for(self, prompt: int, new: int) -> tuple[int, ...]:
        """Slots of each layer that prompts of at most `prompt` tokens and `new` more take.

        Raises:
            CapacityError: more than engines of fixed buffers have.
        """
        fixed, needed = self._engines.slots, slots_per_layer(self.schedule, prompt, new)
        if fixed is None:
            return needed
        if not all(map(ge, fixed, needed)):
            raise CapacityError(
                f"the plans' KV buffers have {', '.join(map(str, sorted({*fixed})))} slots, this run takes {max(needed)}",
                "ask for fewer tokens, or export the model with that schedule",
            )
        return tuple(count and most for count, most in zip(needed, fixed, strict=True))

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run every row's prompt: its keys and values are in the KV buffer then, and the next tokens' logits in `logits`.

        Short prompts of about the same length share a pass, because a pass reads the weights once. A long one goes in chunks,
        so that activations do not grow with P x P.

        Args:
            prompts: token ids of each row, no longer than the decoder was made for and never longer than the row before.
        """
        self.enqueue_prefill(prompts)
        if self._receive is not None:
            self._receive()

    def enqueue_prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """As `prefill`, but the logits stay where the engines leave them."""
        lengths = [len(prompt) for prompt in prompts]
        assert lengths == sorted(lengths, reverse=True)
        self.kv.clear()
        sums = any(group.states for group in self._model.state_layers)
        padding = 0 if sums else _PADDING  # in a state, what a row is padded by would stay
        for rows in _passes(lengths, self._prefill_chunk if self._shares_passes(lengths[0]) else 1, padding):
            self._prefill_rows(rows, prompts[rows])
        self._step = 0
        self.kv.lengths[:] = lengths
        self._place(self.kv.lengths - 1)

    def decode_step(self, tokens: Sequence[int] | IntArray) -> int:
        """Feed one token a row; the next tokens' logits are in `logits` [B,V] float32.

        Returns:
            How many layers the deepest row computed.
        """
        route = self.route()
        for row, token in enumerate(tokens):
            self._id_view[row] = token
            for counter in self._counters:
                counter[row] += 1
        self.advance()
        for send in self._sends:
            send()
        for call in route.calls:
            call()
        if self._receive is not None:
            self._receive()
        return route.deepest

    def send_positions(self, positions: IntArray) -> None:
        """Tell the engines each row's position [B], which is the number of valid slots before it."""
        self._place(positions)
        for send in self._sends:
            send()

    def _place(self, positions: IntArray) -> None:
        self._positions[:, 0] = self._seqlens_k[:] = positions
        self._totals[:] = positions + 1

    def advance(self) -> None:
        """Count the step that `route` told."""
        lengths = self._length_view
        for row in range(len(lengths)):
            lengths[row] += 1
        self._step += 1

    def rewind(self, position: int, length: int) -> None:
        """Make the next decode step the one at `position`, on rows of `length` valid tokens: for measuring one step again."""
        self._step = position
        self.kv.lengths[:] = length
        self._place(self.kv.lengths - 1)

    def route(self) -> Route:
        """The next step's route, found once for each combination of layer counts: the search took half the loop's time."""
        if self.schedule.anchor is Anchor.GENERATED:
            count = self.schedule.layers_at(self._step)
            return self._routes.get(count) or self._new_route(count, np.full(len(self._ids), count))
        counts = np.array([self.schedule.layers_at(length) for length in self.kv.lengths.tolist()])
        key = counts.tobytes()
        return self._routes.get(key) or self._new_route(key, counts)

    def _new_route(self, key: int | bytes, counts: IntArray) -> Route:
        """`counts` [B]: how many layers each row computes in this step, never falling from row to row."""
        starts = np.searchsorted(counts, self._needed).tolist()
        climbs = [self._climb(index, start) for index, start in enumerate(starts) if start < len(counts)]
        self._routes[key] = Route(calls=(self._embed, *climbs, self._head), deepest=int(counts[-1]))
        return self._routes[key]

    def _prefilled_positions(self, layer: int, length: int) -> int:
        """How many of a prompt's `length` positions compute `layer`."""
        cap = self.schedule.cap(layer) if self.schedule.anchor is Anchor.ABSOLUTE else None
        return length if cap is None else min(cap, length)

    def _shares_passes(self, length: int) -> bool:
        """Whether rows can lie one after another: every layer computes all of a prompt's `length` positions."""
        segments = self._engines.segments
        whole = all(self._prefilled_positions(layers[0], length) == length for layers, _ in segments)
        return whole and self._engines.most_prompt_tokens is None

    def _prefill_rows(self, rows: slice, prompts: Sequence[Sequence[int]]) -> None:
        """One pass over some rows' prompts, padded to the longest, which is the first; one row alone goes in chunks."""
        count, length, memory = len(prompts), len(prompts[0]), self.memory
        padded: IntArray = np.zeros((count, length), dtype=np.int64)
        for line, prompt in zip(padded, prompts, strict=True):
            line[: len(prompt)] = prompt
        last: IntArray = np.array([len(prompt) - 1 for prompt in prompts])
        hidden = memory.floats((count * length, self._model.hidden_size))
        step = length if count > 1 else self._prefill_chunk
        pieces = [self._piece(slice(start, min(start + step, length)), last) for start in range(0, length, step)]
        for piece in pieces:
            part = hidden[count * piece.tokens.start : count * piece.tokens.stop].reshape(count, -1, self._model.hidden_size)
            ids, _ = memory.twin(padded[:, piece.tokens])
            self._engines.embed.bind({names.INPUT_IDS: ids, names.POSITION_IDS: piece.positions}, {names.HIDDEN: part})()
        for index in range(len(self._engines.segments)):
            self._prefill_segment(index, rows, hidden, pieces)
        if count == 1:  # its last token alone
            top: dict[str, Array] = {names.HIDDEN: hidden[length - 1 :].reshape(1, 1, -1), names.LAST: self._last[:1]}
        else:
            top = {names.HIDDEN: hidden.reshape(count, length, -1), names.LAST: memory.twin(last)[0]}
        self._engines.head.bind(top, {names.LOGITS: self.bound[names.LOGITS][rows]})()

    def _piece(self, tokens: slice, last: IntArray) -> _Piece:
        positions, _ = self.memory.twin(np.tile(np.arange(tokens.start, tokens.stop), (len(last), 1)))
        seqlens_k, _ = self.memory.twin(np.minimum(last, tokens.stop - 1).astype(np.int32))
        return _Piece(tokens=tokens, positions=positions, seqlens_k=seqlens_k, total=np.array([tokens.stop], dtype=np.int32))

    def _prefill_segment(self, index: int, rows: slice, hidden: Any, pieces: Sequence[_Piece]) -> None:
        """Segment `index` on the prompts of some rows: `hidden` [B*S,H] in place."""
        layers, engine = self._engines.segments[index]
        count = rows.stop - rows.start
        length, width = hidden.shape[0] // count, self._model.hidden_size
        slots = length if self._engines.slots is None else self._engines.slots[layers[0]]
        states = [self.kv.rows(layer, rows) if self.kv.has(layer) else self._passing(layer, count, slots) for layer in layers]
        computed = self._prefilled_positions(layers[0], length)
        for piece in pieces:
            start, stop = piece.tokens.start, min(piece.tokens.stop, computed)
            if start >= stop:
                return
            if stop < piece.tokens.stop:
                piece = self._piece(slice(start, stop), np.array([length - 1]))
            part = hidden[count * start : count * stop].reshape(count, stop - start, width)
            inputs: dict[str, Array] = {
                names.HIDDEN: part,
                names.POSITION_IDS: piece.positions,
                names.SEQLENS_K: piece.seqlens_k,
                names.TOTAL_SEQUENCE_LENGTH: piece.total,
                **self.kv.read(layers, rows),
            }
            bind_segment(engine, inputs, part, states)()

    def _passing(self, layer: int, count: int, slots: int) -> dict[str, Array]:
        """What a layer that no decode step computes needs for the prompts of `count` rows: it lives for this call only."""
        shapes = layer_state(self._model, layer, slots)
        return {name: self.memory.floats((count, *shape)) for name, shape in shapes.items()}

    def _climb(self, index: int, start: int) -> Call:
        """Segment `index` on rows `start ..`, bound when first needed."""
        if (index, start) not in self._climbs:
            layers, engine = self._engines.segments[index]
            hidden = self._hidden[start:]
            # of the suffix's longest row, always on the host; a device's step must not wait for the host, so there it is the most
            total = self._totals[start : start + 1] if isinstance(self.memory, HostMemory) else self._most_totals[index]
            inputs: dict[str, Array] = {
                names.HIDDEN: hidden,
                names.POSITION_IDS: self.bound[names.POSITION_IDS][start:],
                names.SEQLENS_K: self.bound[names.SEQLENS_K][start:],
                names.TOTAL_SEQUENCE_LENGTH: total,
                **self.kv.read(layers, slice(start, None)),
            }
            states = [self.kv.rows(layer, slice(start, None)) for layer in layers]
            self._climbs[index, start] = bind_segment(engine, inputs, hidden, states)
        return self._climbs[index, start]


def _passes(lengths: Sequence[int], most: int, padding: int) -> Iterator[slice]:
    """Rows, longest first, whose prompts share a pass of at most `most` tokens, `padding` a row; a longer one is alone."""
    first = 0
    for row, length in enumerate(lengths):
        longest = lengths[first]
        if row > first and ((row - first + 1) * longest > most or longest - length > padding):
            yield slice(first, row)
            first = row
    yield slice(first, len(lengths))


def bind_segment(engine: Engine, inputs: Mapping[str, Array], hidden: Array, states: Iterable[Mapping[str, Array]]) -> Call:
    """Bind a segment; hidden state and each layer's arrays, by the names of its inputs, are read and written in place."""
    arrays = {name: array for state in states for name, array in state.items()}
    written = {names.present(name): array for name, array in arrays.items()}
    return engine.bind({**inputs, **arrays}, {names.HIDDEN_OUT: hidden, **written})
