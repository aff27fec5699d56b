"""Prefill: the passes over prompts, which fill the KV buffer and give the next tokens' logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skipdecode import bindings
from skipdecode.engines import Engines, bind_segment
from skipdecode.kv_buffer import KVBuffer, key_shapes, state_shapes
from skipdecode.memory import Array, IntArray
from skipdecode.model import Model
from skipdecode.schedule import Anchor, Schedule

PREFILL_CHUNK = 512  # default for prompt tokens per pass: bounds attention scores to chunk x prompt
_MAX_PADDING = 4  # most padding of a row, in tokens: a pass of its own costs as much as 3 (int4) to 10 (fp32) tokens on 2 cores


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Some tokens of a pass over prompts, and the engine inputs that describe them."""

    tokens: slice  # of each row
    positions: Array  # [B,S] int64
    seqlens_k: Array  # [B] int32
    total: Array  # [1] int32, on the host


class Prefill:
    """Runs prompts, which fills the KV buffer and leaves each row's next logits in `bound`.

    Short prompts of about the same length share a pass, because a pass reads the weights once. A long prompt runs in chunks, so
    that activations do not grow with the square of its length. If the topmost segments keep nothing for a row, they compute only
    each prompt's last token.

    Args:
        kv: written in place.
        chunk: prompt tokens per pass.
        bound: arrays by their names in `bindings`: logits [B,V], which the head writes, and `last` [B], zeros.
    """

    def __init__(
        self, engines: Engines, model: Model, schedule: Schedule, kv: KVBuffer, chunk: int, bound: Mapping[str, Array]
    ) -> None:
        self._engines, self._model, self._schedule, self._kv = engines, model, schedule, kv
        self._logits, self._last = bound[bindings.LOGITS], bound[bindings.LAST]
        self._memory = engines.memory
        self._chunk = min(chunk, engines.max_prompt_tokens or chunk)
        keeping = (any(model.layer_group(layer).keeps_anything for layer in segment.layers) for segment in engines.segments)
        self._first_segment_keeping_nothing = max((index + 1 for index, keeps in enumerate(keeping) if keeps), default=0)
        has_states = any(group.states for group in model.state_layers)
        self._max_padding = 0 if has_states else _MAX_PADDING  # a state would keep the padding

    def run(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run every row's prompt; none may be longer than the one before."""
        lengths = [len(prompt) for prompt in prompts]
        self._kv.clear()
        for rows in _group_rows(lengths, self._chunk if self._can_share_passes(lengths[0]) else 1, self._max_padding):
            self._run_pass(rows, prompts[rows])

    def _num_computed(self, layer: int, length: int) -> int:
        """How many of a prompt's `length` positions compute `layer`."""
        cap = self._schedule.cap(layer) if self._schedule.anchor is Anchor.ABSOLUTE else None
        return length if cap is None else min(cap, length)

    def _can_share_passes(self, length: int) -> bool:
        """Whether rows can share a pass: engines take several, and every layer computes all of a prompt's `length` positions."""
        segments = self._engines.segments
        computes_all = all(self._num_computed(segment.layers[0], length) == length for segment in segments)
        return computes_all and self._engines.max_prompt_tokens is None

    def _run_pass(self, rows: slice, prompts: Sequence[Sequence[int]]) -> None:
        """Run some rows' prompts as one piece, padded to the longest, which is the first; or one row's prompt in chunks.

        Either way the hidden state [B*S,H] is one block, and each piece is a contiguous part of it.
        """
        count, length, memory = len(prompts), len(prompts[0]), self._memory
        padded: IntArray = np.zeros((count, length), dtype=np.int64)
        for line, prompt in zip(padded, prompts, strict=True):
            line[: len(prompt)] = prompt
        last: IntArray = np.array([len(prompt) - 1 for prompt in prompts])
        hidden = memory.floats((count * length, self._model.hidden_size))
        step = length if count > 1 else self._chunk
        pieces = [self._prompt_piece(slice(start, min(start + step, length)), last) for start in range(0, length, step)]
        for piece in pieces:
            part = hidden[count * piece.tokens.start : count * piece.tokens.stop].reshape(count, -1, self._model.hidden_size)
            ids, _ = memory.twin(padded[:, piece.tokens])
            self._engines.embed.bind({bindings.INPUT_IDS: ids, bindings.POSITION_IDS: piece.positions}, {bindings.HIDDEN: part})()
        for index in range(self._first_segment_keeping_nothing):
            self._run_segment(index, rows, hidden, pieces)
        if count == 1:  # only its last token
            head_hidden, head_last = hidden[length - 1 :].reshape(1, 1, -1), self._last[:1]
        else:
            head_hidden, head_last = hidden.reshape(count, length, -1), memory.twin(last)[0]
        if self._first_segment_keeping_nothing < len(self._engines.segments):
            head_hidden, head_last = self._run_top(rows, head_hidden, last), self._last[:count]
        self._engines.head.bind({bindings.HIDDEN: head_hidden, bindings.LAST: head_last}, {bindings.LOGITS: self._logits[rows]})()

    def _run_top(self, rows: slice, hidden: Any, last: IntArray) -> Any:
        """Run the topmost segments, which keep nothing, only on the rows' last tokens.

        Args:
            hidden: [B,S,H], or [B,1,H] with the last tokens only.
            last: [B] int64, the index of each row's last token.

        Returns:
            [B,1,H].
        """
        length = hidden.shape[1]
        last_tokens = hidden if length == 1 else self._memory.gather_positions(hidden, last)
        longest = int(last[0]) + 1
        piece = self._make_piece(slice(longest - 1, longest), last[:, None], last)
        for index in range(self._first_segment_keeping_nothing, len(self._engines.segments)):
            if self._num_computed(self._engines.segments[index].layers[0], longest) == longest:
                self._run_engine(index, rows, last_tokens, piece, ())
        return last_tokens

    def _prompt_piece(self, tokens: slice, last: IntArray) -> _Piece:
        positions: IntArray = np.tile(np.arange(tokens.start, tokens.stop), (len(last), 1))
        return self._make_piece(tokens, positions, np.minimum(last, tokens.stop - 1))

    def _make_piece(self, tokens: slice, positions: IntArray, seqlens_k: IntArray) -> _Piece:
        """A piece with positions [B,S] and `seqlens_k` [B] in the engines' memory."""
        positions_twin, _ = self._memory.twin(positions)
        seqlens_twin, _ = self._memory.twin(seqlens_k.astype(np.int32))
        total = np.array([tokens.stop], dtype=np.int32)
        return _Piece(tokens=tokens, positions=positions_twin, seqlens_k=seqlens_twin, total=total)

    def _run_segment(self, index: int, rows: slice, hidden: Array, pieces: Sequence[_Piece]) -> None:
        """Run segment `index` on the prompts of some rows, updating `hidden` [B*S,H] in place."""
        layers = self._engines.segments[index].layers
        count = rows.stop - rows.start
        length, width = hidden.shape[0] // count, self._model.hidden_size
        slots = length if self._engines.slots is None else self._engines.slots[layers[0]]
        states = [
            self._kv.layer_arrays(layer, rows) if self._kv.has_slots(layer) else self._temporary_arrays(layer, count, slots)
            for layer in layers
        ]
        num_computed = self._num_computed(layers[0], length)
        for piece in pieces:
            start, stop = piece.tokens.start, min(piece.tokens.stop, num_computed)
            if start >= stop:
                return
            if stop < piece.tokens.stop:
                piece = self._prompt_piece(slice(start, stop), np.array([length - 1]))
            part = hidden[count * start : count * stop].reshape(count, stop - start, width)
            self._run_engine(index, rows, part, piece, states)

    def _run_engine(self, index: int, rows: slice, hidden: Array, piece: _Piece, states: Iterable[Mapping[str, Array]]) -> None:
        """Run segment `index` on `piece`, updating `hidden` [B,S,H] and its layers' `states` in place."""
        segment = self._engines.segments[index]
        inputs: dict[str, Array] = {
            bindings.HIDDEN: hidden,
            bindings.POSITION_IDS: piece.positions,
            bindings.SEQLENS_K: piece.seqlens_k,
            bindings.TOTAL_SEQUENCE_LENGTH: piece.total,
            **self._kv.source_arrays(segment.layers, rows),
        }
        bind_segment(segment.engine, inputs, hidden, states)()

    def _temporary_arrays(self, layer: int, count: int, slots: int) -> dict[str, Array]:
        """Temporary arrays, for the prompts of `count` rows, of a layer that no decode step computes."""
        keys, states = key_shapes(self._model, layer, slots), state_shapes(self._model, layer)
        arrays = {name: self._memory.floats((count, *shape)) for name, shape in keys.items()}
        return arrays | {name: self._memory.wide_floats((count, *shape)) for name, shape in states.items()}


def _group_rows(lengths: Sequence[int], max_tokens: int, max_padding: int) -> Iterator[slice]:
    """Group rows, longest first, into passes of at most `max_tokens` tokens; a longer prompt is on its own.

    Args:
        max_padding: of a row, in tokens.
    """
    first = 0
    for row, length in enumerate(lengths):
        longest = lengths[first]
        if row > first and ((row - first + 1) * longest > max_tokens or longest - length > max_padding):
            yield slice(first, row)
            first = row
    yield slice(first, len(lengths))
