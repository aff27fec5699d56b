"""The KV buffer: one preallocated key and value array a layer, shared by all variants, with the schedule's shape."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from skipdecode.device import ALIGNMENT
from skipdecode.manifest import Manifest, Model, Target
from skipdecode.memory import Memory
from skipdecode.schedule import Anchor, Schedule

# TensorRT-RTX 1.7.1 builds no two layers for prompts of at most 32 tokens a pass, and a pass has no more tokens than slots
LEAST_SLOTS = 64
FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def slots_per_layer(schedule: Schedule, prompt: int, new: int) -> tuple[int, ...]:
    """Slots that each layer needs for `prompt` + `new` tokens: none where no decode step computes it.

    Position `t` of a row lies in slot `t` (absolute) or `prompt + t` (generated).
    """
    caps = [schedule.cap(layer) for layer in range(schedule.num_layers)]
    if schedule.anchor is Anchor.ABSOLUTE:
        return tuple(min(prompt + new, prompt + new if cap is None else cap) for cap in caps)
    return tuple(0 if cap == 0 else prompt + min(new, new if cap is None else cap) for cap in caps)


def static_slots(schedule: Schedule, max_length: int, slot_bytes: int) -> tuple[int, ...]:
    """Slots that each layer needs for any run of at most `max_length` tokens: what engines with static buffers are built for.

    A layer that no decode step computes has buffers too, which a prompt's keys and values pass through.

    Args:
        slot_bytes: of a slot's keys, KVH x D. There may be some slots more, so that each row's begin at an aligned address.

    Returns:
        At least LEAST_SLOTS each.
    """
    absolute = schedule.anchor is Anchor.ABSOLUTE
    needed = slots_per_layer(schedule, 0, max_length) if absolute else (max_length,) * schedule.num_layers
    step = ALIGNMENT // math.gcd(ALIGNMENT, slot_bytes)
    return tuple(-(-max(slots or max_length, LEAST_SLOTS) // step) * step for slots in needed)


def plan_slots(manifest: Manifest, target: Target) -> tuple[int, ...]:
    """`static_slots` of a bundle's plans."""
    model = manifest.model
    return static_slots(manifest.schedule, manifest.limits.max_length, model.num_kv_heads * model.head_size * target.float_bytes)


class KVBuffer:
    """Memory and lengths, nothing else.

    All of it is one block: numpy asks for huge pages for large arrays alone, and a decode step reads every valid slot.

    Attributes:
        keys, values: a layer's [B, KVH, C, D] in the memory's float type, C its own number of slots; None where it needs none.
        lengths: [B] int64, valid tokens of each row; on the host.
    """

    def __init__(self, model: Model, rows: int, slots: tuple[int, ...], memory: Memory) -> None:
        shapes = [(rows, model.num_kv_heads, count, model.head_size) for count in slots for _ in ("keys", "values")]
        ends = list(accumulate(map(math.prod, shapes), initial=0))  # in numbers
        block = memory.floats((ends[-1],))
        parts: list[Any] = [
            block[start:end].reshape(*shape) if end > start else None
            for (start, end), shape in zip(pairwise(ends), shapes, strict=True)
        ]
        self.keys, self.values = parts[::2], parts[1::2]
        self.lengths: IntArray = np.zeros(rows, dtype=np.int64)

    def has(self, layer: int) -> bool:
        """Whether any decode step computes `layer`."""
        return self.keys[layer] is not None

    def rows(self, layer: int, rows: slice) -> tuple[Any, Any]:
        """Keys and values of some rows of a layer, contiguous, at the buffer's own addresses."""
        key, value = self.keys[layer], self.values[layer]
        assert key is not None and value is not None, f"no decode step computes layer {layer}"
        return key[rows], value[rows]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(array.nbytes for array in (*self.keys, *self.values) if array is not None)
