"""A model as the runtime sees it: its dimensions, and what each of its layers keeps for a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from skipdecode.errors import ScheduleError
from skipdecode.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueSizes:
    """Sizes of a layer's keys, and of its values too."""

    num_heads: int  # KVH
    head_size: int  # D


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A recurrent state: an array of constant size, whatever the row's length; zeros before the row's first token."""

    name: str  # the layer's engine reads past_{name}.{l} and writes present_{name}.{l}
    shape: tuple[int, ...]  # of one row


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """A group of layers that keep the same for a row: keys and values of their own or none, and recurrent states."""

    layers: tuple[int, ...]  # ascending
    keys: KeyValueSizes | None  # None: these layers have no keys of their own
    keys_of: int | None  # a lower layer, computed at every position, whose keys and values these layers read
    states: tuple[State, ...]

    @property
    def keeps_anything(self) -> bool:
        """Whether these layers keep anything for a row."""
        return self.keys is not None or bool(self.states)


def layer_group(groups: Sequence[LayerGroup], keys: KeyValueSizes, layer: int) -> LayerGroup:
    """The group that `layer` belongs to; if it is in none, a group of its own with `keys` and nothing else."""
    own = next((group for group in groups if layer in group.layers), None)
    return own or LayerGroup(layers=(layer,), keys=keys, keys_of=None, states=())


def key_sizes(groups: Sequence[LayerGroup], keys: KeyValueSizes) -> set[KeyValueSizes]:
    """The distinct key sizes of all layers that have keys; `keys` are those of layers in no group."""
    return {each for each in (keys, *(group.keys for group in groups)) if each is not None and each.num_heads}


def check_sources(sources: Collection[int], schedule: Schedule) -> None:
    """Refuse a schedule that skips a layer whose keys and values other layers read.

    Args:
        sources: the layers that others read.

    Raises:
        ScheduleError: one of them is not computed at every position.
    """
    skipped = [layer for layer in sources if schedule.cap(layer) is not None]
    if skipped:
        raise ScheduleError(
            f"skips layer {min(skipped)}, whose keys and values later layers read at every position",
            f"give {max(sources) + 1} warm-up layers or more", where=f"{schedule.name} schedule",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Identity and dimensions of the exported model."""

    name: str
    model_type: str
    num_layers: int  # L
    hidden_size: int  # H, between layers
    num_heads: int  # NH, 0 where no layer has attention
    num_kv_heads: int  # KVH of a layer in none of `state_layers`; 0 where no layer has attention
    head_size: int  # D, likewise
    vocab_size: int  # V
    num_parameters: int  # tied weights once
    state_layers: tuple[LayerGroup, ...]  # all other layers keep keys and values of the sizes above, and nothing else
    eos_token_ids: tuple[int, ...]  # empty: no token ends a row

    @property
    def keys(self) -> KeyValueSizes:
        """Key sizes of a layer in none of `state_layers`."""
        return KeyValueSizes(num_heads=self.num_kv_heads, head_size=self.head_size)

    def layer_group(self, layer: int) -> LayerGroup:
        """What `layer` keeps for a row."""
        return layer_group(self.state_layers, self.keys, layer)

    @property
    def key_sources(self) -> frozenset[int]:
        """The layers whose keys and values other layers read."""
        return frozenset(group.keys_of for group in self.state_layers if group.keys_of is not None)


def has_valid_sizes(model: Model) -> bool:
    """Whether every size is positive and below 2**63, so that dividing by it or multiplying it is safe.

    Head counts and head size may all be 0 if no layer has keys of its own.
    """
    heads = (model.num_heads, model.num_kv_heads, model.head_size)
    has_no_keys = not any(heads) and sum(len(group.layers) for group in model.state_layers if not group.keys) == model.num_layers
    others = (model.num_layers, model.hidden_size, model.vocab_size, model.num_parameters)
    return all(0 < size < 2**63 for size in (others if has_no_keys else (*others, *heads)))


def has_valid_states(model: Model) -> bool:
    """Whether `state_layers` is well formed.

    Each layer exists and is named at most once, the layers of a group are ascending, and each array has positive sizes and a
    name of its own.
    """
    layers = [layer for group in model.state_layers for layer in group.layers]
    rising = all(
        before < after for group in model.state_layers for before, after in pairwise((-1, *group.layers, model.num_layers))
    )
    return rising and len({*layers}) == len(layers) and all(map(_has_valid_arrays, model.state_layers))


def _has_valid_arrays(group: LayerGroup) -> bool:
    names = [*(("key", "value") if group.keys else ()), *(state.name for state in group.states)]
    sizes = [size for state in group.states for size in state.shape]
    sizes += dataclasses.astuple(group.keys) if group.keys else ()
    shaped = all(state.shape for state in group.states)
    return len({*names}) == len(names) and shaped and all(0 < size < 2**31 for size in sizes)


def has_valid_sources(model: Model) -> bool:
    """Whether every layer whose keys others read lies below its readers and has keys of its own."""
    readers = [(group, group.keys_of) for group in model.state_layers if group.keys_of is not None]
    return all(
        group.keys is None and 0 <= source < min(group.layers, default=0) and model.layer_group(source).keys
        for group, source in readers
    )
