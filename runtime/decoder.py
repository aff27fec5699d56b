"""The decode step: the climb through the segments, each row computing exactly its own layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skipdecode import bindings
from skipdecode.device import Call
from skipdecode.engines import Engines, bind_segment
from skipdecode.errors import CapacityError
from skipdecode.kv_buffer import KVBuffer, fixed_slots, have_room, slots_per_layer
from skipdecode.memory import Array, FloatArray, HostMemory, IntArray
from skipdecode.model import Model
from skipdecode.prefill import PREFILL_CHUNK, Prefill
from skipdecode.schedule import Anchor, Schedule

# a limit, because ragged rows under an absolute anchor keep producing new combinations of layer counts
MAX_ROUTES = 256


# eq=False: a route is identified by object, because `DeviceLoop` keeps one graph per route for as long as it is kept here
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Route:
    """The calls that one step makes."""

    calls: tuple[Call, ...]  # embedding, segments on their rows, lowest first, head
    deepest: int  # layers that the deepest row computes


class Decoder:
    """One batch in progress: engines bound to one KV buffer.

    Rows must come longest prompt first, so that the rows active in any segment are a suffix of the batch (fewest active
    layers first). A segment then runs only on that suffix.

    Args:
        prompt_lengths: tokens in each row's prompt, in descending order.
        new: how many decode steps to make room for.
        prefill_chunk: prompt tokens per pass.

    Attributes:
        logits: [B,V] float32 on the host, those of the next tokens; after `keep_rows` only the remaining rows'.
        bound: the arrays that engines are bound to, by their names in `bindings`: ids [B,1], positions [B,1], `seqlens_k` [B],
            `last` [B] and logits [B,V].
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
        self.slots = self.slots_for(max(prompt_lengths), new)
        self.kv = KVBuffer(model, rows, self.slots, memory)
        self._step, self._rows_share_position = 0, schedule.anchor is Anchor.GENERATED
        self._first_row = 0  # rows before it were dropped by `keep_rows`
        self._least_counts = [schedule.least_count(segment.layers[0]) for segment in engines.segments]
        self._ids: IntArray = np.zeros((rows, 1), dtype=np.int64)
        self._positions: IntArray = np.zeros((rows, 1), dtype=np.int64)
        self._seqlens_k = np.zeros(rows, dtype=np.int32)
        self._totals = np.zeros(rows, dtype=np.int32)
        # a step writes through these: each numpy call costs 20 us after an engine has evicted the CPU's caches
        step_arrays = (self._ids, self._positions, self._seqlens_k, self._totals, self.kv.lengths)
        self._views = [array.reshape(-1).data for array in step_arrays]
        self._capacity = max(self.slots)
        self._max_totals = [np.array([self.slots[segment.layers[0]]], dtype=np.int32) for segment in engines.segments]
        self._hidden = memory.floats((rows, 1, model.hidden_size))
        self.bound: dict[str, Array] = {}
        self._sends: list[Call] = []
        for name, array in (
            (bindings.INPUT_IDS, self._ids), (bindings.POSITION_IDS, self._positions), (bindings.SEQLENS_K, self._seqlens_k),
        ):  # fmt: skip
            self.bound[name], send = memory.twin(array)
            self._sends += [send] if send is not None else []
        self.bound[bindings.LAST], _ = memory.twin(np.zeros(rows, dtype=np.int64))
        self.logits: FloatArray
        self._receive: Call | None
        self.logits, self.bound[bindings.LOGITS], self._receive = memory.result((rows, model.vocab_size), np.float32)
        self._embed, self._head = self._bind_embed_and_head()
        self._prefill = Prefill(engines, model, schedule, self.kv, prefill_chunk, self.bound)
        self._climbs: dict[tuple[int, int], Call] = {}
        self._routes: dict[int | bytes, Route] = {}

    def slots_for(self, prompt: int, new: int) -> tuple[int, ...]:
        """Slots per layer for prompts of at most `prompt` tokens and `new` more tokens.

        Raises:
            CapacityError: engines with fixed KV buffers have fewer.
        """
        fixed, needed = self._engines.slots, slots_per_layer(self.schedule, prompt, new)
        if fixed is None:
            return needed
        if not have_room(fixed, needed):
            raise CapacityError(
                f"the plans' KV buffers have {', '.join(map(str, sorted({*fixed})))} slots, but this run needs {max(needed)}",
                "ask for fewer tokens, or export the model with the schedule of this run",
            )
        return fixed_slots(needed, fixed)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run every row's prompt, which fills the KV buffer and leaves the next tokens' logits in `logits`.

        Args:
            prompts: token ids of each row, 0 .. V-1 (not checked here); no longer than the decoder was made for, nor than the
                row before.
        """
        self.enqueue_prefill(prompts)
        if self._receive is not None:
            self._receive()

    def enqueue_prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """As `prefill`, but leaves the logits where the engines write them."""
        lengths = [len(prompt) for prompt in prompts]
        assert lengths == sorted(lengths, reverse=True)
        self._prefill.run(prompts)
        self._step = 0
        self.kv.lengths[:] = lengths

    def decode_step(self, tokens: Sequence[int] | IntArray) -> int:
        """Feed one token per row and leave the next tokens' logits in `logits` [B,V] float32.

        Args:
            tokens: [B] ids, 0 .. V-1 (not checked here), in the order of the prompts.

        Returns:
            How many layers the deepest row computed.

        Raises:
            CapacityError: the KV buffer has no room for another step.
        """
        route = self.route()
        ids, positions, seqlens_k, totals, lengths = self._views
        if lengths[self._first_row] >= self._capacity:  # the longest row
            raise CapacityError(f"the KV buffer's {self._capacity} slots are full", "create the decoder for more steps")
        for row, token in enumerate(tokens, self._first_row):
            position = lengths[row]
            ids[row], positions[row], seqlens_k[row] = token, position, position
            totals[row] = lengths[row] = position + 1
        self._step += 1
        for send in self._sends:
            send()
        for call in route.calls:
            call()
        if self._receive is not None:
            self._receive()
        return route.deepest

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only some rows, moving them to the last places of the batch. Host engines only.

        Args:
            rows: indices among the present rows, ascending. From here on `decode_step` takes and `logits` holds only these.
        """
        first = len(self._ids) - len(rows)
        for place, row in reversed([*zip(range(first, len(self._ids)), rows, strict=True)]):  # so that none is overwritten unread
            if self._first_row + row != place:
                self.kv.move(self._first_row + row, place)
        self.logits = self.logits[first - self._first_row :]
        self._first_row = first
        self._embed, self._head = self._bind_embed_and_head()
        self._routes.clear()

    def send_positions(self, positions: IntArray) -> None:
        """Send each row's position [B] int64 to a device's engines: the slot of its next token, all slots before it being valid.

        Pass one less if a turn-around comes before the next step, because it adds one.
        """
        self._positions[:, 0] = self._seqlens_k[:] = positions
        for send in self._sends:
            send()

    def advance(self) -> None:
        """Count one step on the host; the device counts its own positions."""
        self.kv.lengths += 1
        self._step += 1

    def rewind(self, position: int, length: int) -> None:
        """Make the next decode step the one at `position`, on rows of `length` valid tokens, to measure one step repeatedly."""
        self._step = position
        self.kv.lengths[:] = length

    def route(self) -> Route:
        """The next step's route, built once per combination of layer counts, because building it took half the loop's time."""
        if self._rows_share_position:
            count = self.schedule.layers_at(self._step)
            return self._routes.get(count) or self._new_route(count, np.full(len(self._ids) - self._first_row, count))
        counts = np.array([self.schedule.layers_at(length) for length in self.kv.lengths[self._first_row :].tolist()])
        key = counts.tobytes()
        route = self._routes.pop(key, None)
        if route is None:
            return self._new_route(key, counts)
        self._routes[key] = route  # now the last one to be dropped
        return route

    def _new_route(self, key: int | bytes, counts: IntArray) -> Route:
        """Build and keep a route; `counts` [B] are the layers that each row computes in this step, in ascending order."""
        starts = (self._first_row + np.searchsorted(counts, self._least_counts)).tolist()
        climbs = [self._climb(index, start) for index, start in enumerate(starts) if start < len(self._ids)]
        if len(self._routes) == MAX_ROUTES:
            del self._routes[next(iter(self._routes))]
        self._routes[key] = Route(calls=(self._embed, *climbs, self._head), deepest=int(counts[-1]))
        return self._routes[key]

    def _bind_embed_and_head(self) -> tuple[Call, Call]:
        """Bind embedding and head to the present rows."""
        rows = slice(self._first_row, None)
        ids, positions, last, logits = (
            self.bound[name][rows] for name in (bindings.INPUT_IDS, bindings.POSITION_IDS, bindings.LAST, bindings.LOGITS)
        )
        hidden = self._hidden[rows]
        embed = self._engines.embed.bind({bindings.INPUT_IDS: ids, bindings.POSITION_IDS: positions}, {bindings.HIDDEN: hidden})
        return embed, self._engines.head.bind({bindings.HIDDEN: hidden, bindings.LAST: last}, {bindings.LOGITS: logits})

    def _climb(self, index: int, start: int) -> Call:
        """Segment `index` on rows `start ..`, bound when first needed."""
        if (index, start) not in self._climbs:
            segment = self._engines.segments[index]
            hidden = self._hidden[start:]
            # valid slots of the longest of these rows, read on the host; a captured step keeps the recorded value: the largest
            total = self._totals[start : start + 1] if isinstance(self.memory, HostMemory) else self._max_totals[index]
            inputs: dict[str, Array] = {
                bindings.HIDDEN: hidden,
                bindings.POSITION_IDS: self.bound[bindings.POSITION_IDS][start:],
                bindings.SEQLENS_K: self.bound[bindings.SEQLENS_K][start:],
                bindings.TOTAL_SEQUENCE_LENGTH: total,
                **self.kv.source_arrays(segment.layers, slice(start, None)),
            }
            states = [self.kv.layer_arrays(layer, slice(start, None)) for layer in segment.layers]
            self._climbs[index, start] = bind_segment(segment.engine, inputs, hidden, states)
        return self._climbs[index, start]
