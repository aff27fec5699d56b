"""The KV buffer: one preallocated key and value array per layer, shared by all variants, with the schedule's shape.

A layer with linear attention, Mamba or a short convolution has states of constant size instead of keys and values, or alongside
them. Some layers read the keys and values of another layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from skipdecode import bindings
from skipdecode.device import ALIGNMENT
from skipdecode.manifest import Manifest, Target
from skipdecode.memory import Array, DeviceMemory, IntArray, Memory
from skipdecode.model import KeyValueSizes, LayerGroup, Model, key_sizes, layer_group
from skipdecode.schedule import Anchor, Schedule

# TensorRT-RTX 1.7.1 cannot build a plan of two or more layers whose longest pass over a prompt has 64 tokens or fewer, and a pass
# has no more tokens than its KV buffer has slots
MIN_SLOTS = 128
STATE_BYTES = 4  # per number in a state: fp32 on every target, because each step's rounding would stay in it


def slots_per_layer(schedule: Schedule, prompt: int, new: int) -> tuple[int, ...]:
    """Slots that each layer needs for `prompt` + `new` tokens: none for a layer that no position of the schedule computes.

    Position `t` of a row lies in slot `t` (absolute) or `prompt + t` (generated).
    """
    caps = [schedule.cap(layer) for layer in range(schedule.num_layers)]
    if schedule.anchor is Anchor.ABSOLUTE:
        return tuple(min(prompt + new, prompt + new if cap is None else cap) for cap in caps)
    return tuple(0 if cap == 0 else prompt + min(new, new if cap is None else cap) for cap in caps)


def static_slots(
    schedule: Schedule, max_length: int, groups: Sequence[LayerGroup], keys: KeyValueSizes, float_bytes: int
) -> tuple[int, ...]:
    """Slots of the keys that each layer reads, enough for any run of at most `max_length` tokens: what plans are built for.

    A layer that no decode step computes has buffers, too, which a prompt's keys and values pass through. Counts are rounded up so
    that each row's slots begin at an aligned address.

    Args:
        groups: layers that keep anything other than keys and values of the sizes `keys` (`Model.state_layers`).
        keys: key sizes of every other layer.
        float_bytes: bytes of a number in keys and values.

    Returns:
        At least MIN_SLOTS each.
    """
    absolute = schedule.anchor is Anchor.ABSOLUTE
    needed = slots_per_layer(schedule, 0, max_length) if absolute else (max_length,) * schedule.num_layers
    # a common divisor of the bytes of one slot's keys, KVH x D numbers, over all layers
    slot_bytes = math.gcd(*(each.num_heads * each.head_size for each in key_sizes(groups, keys))) * float_bytes
    step = ALIGNMENT // math.gcd(ALIGNMENT, slot_bytes)
    sources = (layer_group(groups, keys, layer).keys_of for layer in range(schedule.num_layers))
    slots_read = [needed[layer if source is None else source] for layer, source in enumerate(sources)]
    return tuple(-(-max(slots or max_length, MIN_SLOTS) // step) * step for slots in slots_read)


def fixed_slots(needed: Sequence[int], fixed: Sequence[int]) -> tuple[int, ...]:
    """Slots per layer for buffers of a `fixed` size: none if none are `needed`, else all."""
    return tuple(size if count else 0 for count, size in zip(needed, fixed, strict=True))


def have_room(slots: Sequence[int], needed: Sequence[int]) -> bool:
    """Whether buffers with `slots` per layer hold the `needed` ones."""
    return all(have >= count for have, count in zip(slots, needed, strict=True))


def plan_slots(manifest: Manifest, target: Target) -> tuple[int, ...]:
    """`static_slots` for a bundle's plans."""
    model = manifest.model
    return static_slots(manifest.schedule, manifest.limits.max_length, model.state_layers, model.keys, target.float_bytes)


def key_shapes(model: Model, layer: int, slots: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the keys and values that `layer` keeps for a row with `slots` slots, by the names of its engine's inputs.

    Their dtype is the engines' float type.
    """
    keys = model.layer_group(layer).keys
    if keys is None:
        return {}
    shape = (keys.num_heads, slots, keys.head_size)
    return {bindings.of_layer(name, layer): shape for name in (bindings.PAST_KEY, bindings.PAST_VALUE)}


def state_shapes(model: Model, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the states that `layer` keeps for a row, named as in `key_shapes`; fp32, zeros before the row's first token."""
    return {bindings.of_layer(bindings.past(state.name), layer): state.shape for state in model.layer_group(layer).states}


def keys_read(model: Model, layers: Sequence[int]) -> tuple[tuple[int, str], ...]:
    """The keys and values that `layers` read from other layers: (layer, name of its array) pairs."""
    sources = {source for layer in layers if (source := model.layer_group(layer).keys_of) is not None} - {*layers}
    return tuple(
        (source, bindings.of_layer(name, source))
        for source in sorted(sources)
        for name in (bindings.PAST_KEY, bindings.PAST_VALUE)
    )


def state_bytes(group: LayerGroup, slots: int, float_bytes: int) -> int:
    """Bytes that a layer of `group` keeps for a row with `slots` slots; a number in keys and values takes `float_bytes`."""
    keys = 2 * group.keys.num_heads * slots * group.keys.head_size if group.keys else 0
    return keys * float_bytes + sum(math.prod(state.shape) for state in group.states) * STATE_BYTES


def _count_numbers(shapes: Sequence[dict[str, tuple[int, ...]]]) -> int:
    return sum(math.prod(shape) for of_layer in shapes for shape in of_layer.values())


class KVBuffer:
    """What layers keep for the rows of a batch, and the rows' lengths.

    All keys and values are one allocation, because numpy asks for huge pages only for large arrays and each decode step reads
    every valid slot. States are another.

    Args:
        slots: C of each layer; 0: the layer gets neither keys and values nor states.

    Attributes:
        layers: per layer the arrays [B, ...] of `key_shapes`, in the memory's float type, and of `state_shapes`, in fp32; none
            for a layer with 0 slots.
        lengths: [B] int64, valid tokens of each row; on the host.
    """

    def __init__(self, model: Model, rows: int, slots: tuple[int, ...], memory: Memory) -> None:
        self._model, self._memory = model, memory
        self._slots = slots
        states = [state_shapes(model, layer) if count else {} for layer, count in enumerate(slots)]
        keys = [key_shapes(model, layer, count) if count else {} for layer, count in enumerate(slots)]
        self._key_block, self._keys = _allocate_layers(memory.floats, rows, keys)
        self._state_block, self._states = _allocate_layers(memory.wide_floats, rows, states)
        self.layers: list[dict[str, Any]] = [keys | states for keys, states in zip(self._keys, self._states, strict=True)]
        self.lengths: IntArray = np.zeros(rows, dtype=np.int64)

    def has_slots(self, layer: int) -> bool:
        """Whether `layer` has slots: whether any position of the schedule computes it."""
        return self._slots[layer] > 0

    def layer_arrays(self, layer: int, rows: slice) -> dict[str, Any]:
        """A layer's arrays for some rows: contiguous views of the buffer."""
        assert self.has_slots(layer), f"no decode step computes layer {layer}"
        return {name: array[rows] for name, array in self.layers[layer].items()}

    def source_arrays(self, layers: Sequence[int], rows: slice) -> dict[str, Array]:
        """The keys and values that `layers` read from other layers, new tokens' included, by the names of the engine's inputs."""
        return {bindings.present(name): self.layers[source][name][rows] for source, name in keys_read(self._model, layers)}

    def move(self, row: int, place: int) -> None:
        """Move `row` to `place`, overwriting the row that was there. Host memory only."""
        length = int(self.lengths[row])
        for states in self._states:
            for array in states.values():
                array[place] = array[row]
        for keys in self._keys:
            for array in keys.values():
                array[place, :, :length] = array[row, :, :length]
        self.lengths[place] = length

    def clear(self) -> None:
        """Zero the states, and on a device keys and values, too.

        Attention on a device multiplies every slot by a weight, 0 if the slot is not valid. A NaN left by an earlier run would
        stay a NaN.
        """
        self._memory.clear(self._state_block)
        if isinstance(self._memory, DeviceMemory):
            self._memory.clear(self._key_block)


def _allocate_layers(
    allocate: Callable[[tuple[int, ...]], Any], rows: int, shapes: Sequence[dict[str, tuple[int, ...]]]
) -> tuple[Any, list[dict[str, Any]]]:
    """Make one allocation and divide it into each layer's arrays [rows, ...] of the given shapes."""
    block = allocate((rows * _count_numbers(shapes),))
    layers: list[dict[str, Any]] = []
    end = 0  # counted in numbers, not bytes
    for of_layer in shapes:
        layers.append({})
        for name, shape in of_layer.items():
            start, end = end, end + rows * math.prod(shape)
            layers[-1][name] = block[start:end].reshape(rows, *shape)
    return block, layers
