"""What a model is to the runtime: its dimensions, and what each of its layers keeps of a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from skipdecode.errors import ScheduleError
from skipdecode.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Sizes of a layer's keys, which are also those of its values."""

    num_heads: int  # KVH
    head_size: int  # D


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """An array that has one size whatever the length, zeros before a row's first token."""

    name: str  # its engine reads past_{name}.{l} and writes present_{name}.{l}
    shape: tuple[int, ...]  # of one row


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayers:
    """A group of layers that store the same things for a row: keys and values of their own or none, and recurrent states."""

    layers: tuple[int, ...]  # rising
    keys: Keys | None  # None: they have none of their own
    keys_of: int | None  # a layer below, computed at every position, whose keys and values they read
    states: tuple[State, ...]

    @property
    def keeps_anything(self) -> bool:
        """Whether they keep anything of a row."""
        return self.keys is not None or bool(self.states)


def kept(groups: Sequence[StateLayers], keys: Keys, layer: int) -> StateLayers:
    """The group that `layer` is in; where it is in none, one that has `keys`."""
    own = next((group for group in groups if layer in group.layers), None)
    return own or StateLayers(layers=(layer,), keys=keys, keys_of=None, states=())


def key_sizes(groups: Sequence[StateLayers], keys: Keys) -> set[Keys]:
    """Those of all layers that have any; `keys`: of layers that are in no group."""
    return {each for each in (keys, *(group.keys for group in groups)) if each is not None and each.num_heads}


def check_sources(sources: Collection[int], schedule: Schedule) -> None:
    """Raises ScheduleError where one of `sources`, whose keys and values others read, is not computed at every position."""
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
    num_kv_heads: int  # KVH, and
    head_size: int  # D, of a layer in none of `state_layers`; 0 where each is in one
    vocab_size: int  # V
    num_parameters: int  # tied weights once
    state_layers: tuple[StateLayers, ...]  # every other layer has keys and values of those sizes, and nothing else
    eos_token_ids: tuple[int, ...]  # empty: no token ends a row

    @property
    def keys(self) -> Keys:
        """Of a layer in none of `state_layers`."""
        return Keys(num_heads=self.num_kv_heads, head_size=self.head_size)

    def kept(self, layer: int) -> StateLayers:
        """What `layer` keeps."""
        return kept(self.state_layers, self.keys, layer)

    @property
    def key_sources(self) -> frozenset[int]:
        """The layers whose keys and values others read."""
        return frozenset(group.keys_of for group in self.state_layers if group.keys_of is not None)


def sizes_hold(model: Model) -> bool:
    """Whether every number is one that a size can be: what divides by it or multiplies it is safe.

    Those of heads are 0 where all layers keep states in the place of keys.
    """
    heads = (model.num_heads, model.num_kv_heads, model.head_size)
    without = not any(heads) and sum(len(group.layers) for group in model.state_layers if not group.keys) == model.num_layers
    others = (model.num_layers, model.hidden_size, model.vocab_size, model.num_parameters)
    return all(0 < size < 2**63 for size in (others if without else (*others, *heads)))


def states_hold(model: Model) -> bool:
    """Whether `state_layers` name layers of the model, rising and once, and what each keeps has sizes and a name of its own."""
    layers = [layer for group in model.state_layers for layer in group.layers]
    rising = all(
        before < after for group in model.state_layers for before, after in pairwise((-1, *group.layers, model.num_layers))
    )
    return rising and len({*layers}) == len(layers) and all(map(_kept_once, model.state_layers))


def _kept_once(group: StateLayers) -> bool:
    names = [*(("key", "value") if group.keys else ()), *(state.name for state in group.states)]
    sizes = [size for state in group.states for size in state.shape]
    sizes += dataclasses.astuple(group.keys) if group.keys else ()
    shaped = all(state.shape for state in group.states)
    return len({*names}) == len(names) and shaped and all(0 < size < 2**31 for size in sizes)


def sources_hold(model: Model) -> bool:
    """Whether every layer whose keys others read is below those and has its own."""
    readers = [(group, group.keys_of) for group in model.state_layers if group.keys_of is not None]
    return all(
        group.keys is None and 0 <= source < min(group.layers, default=0) and model.kept(source).keys for group, source in readers
    )
