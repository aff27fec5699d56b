"""The KV buffer has the schedule's shape."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipdecode.device import ALIGNMENT, HostDevice
from skipdecode.kv_buffer import (
    MIN_SLOTS,
    KVBuffer,
    fixed_slots,
    keys_read,
    plan_slots,
    slots_per_layer,
    state_bytes,
    static_slots,
)
from skipdecode.memory import DeviceMemory, HostMemory
from skipdecode.model import KeyValueSizes, LayerGroup, Model, State
from skipdecode.schedule import Anchor, Schedule, full_depth
from tests.manifests import make_manifest
from tests.runtime.test_schedule import schedules


@given(schedules(), st.integers(1, 50), st.integers(1, 80))
def test_each_layer_has_slots_for_the_prompt_and_each_step_that_computes_it(schedule: Schedule, prompt: int, new: int) -> None:
    slots = slots_per_layer(schedule, prompt, new)
    for layer, count in enumerate(slots):
        steps = sum(layer in schedule.active(t) for t in range(new))
        assert count == (prompt + steps if steps else 0)


@given(schedules(), st.integers(1, 50), st.integers(1, 80))
def test_an_absolute_anchor_counts_the_prompt_too(schedule: Schedule, prompt: int, new: int) -> None:
    absolute = dataclasses.replace(schedule, anchor=Anchor.ABSOLUTE)
    slots = slots_per_layer(absolute, prompt, new)
    for layer, count in enumerate(slots):
        assert count == sum(layer in schedule.active(t) for t in range(prompt + new))


@given(schedules(), st.integers(2, 50), st.sampled_from([16, 64, 2048, 2560]), st.data())
def test_static_slots_hold_every_run_of_the_longest_length_in_aligned_rows(
    schedule: Schedule, longest: int, width: int, data: st.DataObject
) -> None:
    schedule = dataclasses.replace(schedule, anchor=data.draw(st.sampled_from(Anchor)))
    prompt = data.draw(st.integers(1, longest - 1))
    needed = slots_per_layer(schedule, prompt, longest - prompt)
    keys, slot_bytes = KeyValueSizes(num_heads=1, head_size=width), width * 2
    for slots, most in zip(needed, static_slots(schedule, longest, (), keys, 2), strict=True):
        assert max(slots, MIN_SLOTS) <= most and most * slot_bytes % ALIGNMENT == 0
        assert most - max(longest, MIN_SLOTS) < ALIGNMENT // slot_bytes or most <= max(longest, MIN_SLOTS)
        assert most, "a prompt passes through layers that no decode step computes"


def test_a_layer_that_reads_anothers_keys_has_as_many_slots_as_the_other() -> None:
    schedule = Schedule(name="step", num_layers=4, warmup_layers=1, layers=(4,) * 150 + (2,), anchor=Anchor.ABSOLUTE)
    keys, reader = KeyValueSizes(num_heads=1, head_size=128), LayerGroup(layers=(2,), keys=None, keys_of=0, states=())
    assert static_slots(schedule, 500, (), keys, 2) == (500, 150, 150, 500)
    assert static_slots(schedule, 500, (reader,), keys, 2) == (500, 150, 500, 500)


def test_each_row_is_aligned_even_where_some_layers_have_narrower_keys() -> None:
    keys, narrow = (
        KeyValueSizes(num_heads=1, head_size=128),
        LayerGroup(layers=(1,), keys=KeyValueSizes(num_heads=1, head_size=24), keys_of=None, states=()),
    )
    assert static_slots(full_depth(2), 500, (), keys, 2) == (500, 500)
    assert static_slots(full_depth(2), 500, (narrow,), keys, 2) == (512, 512), "500 slots of 48 bytes end at an unaligned address"


def test_layers_that_no_step_computes_have_static_slots_for_the_longest_prompt() -> None:
    never = Schedule(name="step", num_layers=4, warmup_layers=1, layers=(2,), anchor=Anchor.ABSOLUTE)
    assert static_slots(never, 500, (), KeyValueSizes(num_heads=1, head_size=128), 2) == (500,) * 4
    assert fixed_slots(slots_per_layer(never, 3, 9), (500,) * 4) == (500, 0, 0, 500), "no run keeps them"


def test_slots_of_plans_depend_on_the_targets_number_format(tmp_path: Path) -> None:
    made = make_manifest(full_depth(2), tmp_path)
    made = dataclasses.replace(made, limits=dataclasses.replace(made.limits, max_length=129))
    for name, slots in (("tensorrt-rtx", 144), ("cpu", 136)):
        assert plan_slots(made, dataclasses.replace(made.targets[0], name=name)) == (slots, slots)


MODEL = Model(
    name="m", model_type="opt", num_layers=3, hidden_size=8, num_heads=2, num_kv_heads=2, head_size=4, vocab_size=9,
    num_parameters=1, state_layers=(), eos_token_ids=(),
)  # fmt: skip


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no huge pages to ask for")
def test_a_large_buffer_asks_for_huge_pages_although_no_layer_is_large() -> None:
    buffer = KVBuffer(MODEL, 8, (20_000,) * 3, HostMemory())
    arrays = [array for layer in buffer.layers for array in layer.values()]
    assert len(arrays) == 6 and max(array.nbytes for array in arrays) < 8 << 20 < sum(array.nbytes for array in arrays)
    for array in arrays:
        assert "hg" in _flags(array.ctypes.data + array.nbytes // 2)


def _flags(address: int) -> list[str]:
    """The flags of the mapping that the address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()
    raise AssertionError("no such mapping")


def test_bytes_are_those_of_the_slots_and_layers_without_steps_take_none() -> None:
    buffer = KVBuffer(MODEL, 5, (7, 0, 4), HostMemory())
    assert sum(array.nbytes for layer in buffer.layers for array in layer.values()) == 2 * 5 * 2 * 4 * 4 * (7 + 4)
    assert [buffer.has_slots(layer) for layer in range(3)] == [True, False, True]


def test_on_a_device_keys_are_narrow_and_states_are_not() -> None:
    """In a narrow state, each step's rounding would stay."""
    conv = State(name="conv_state", shape=(7, 3))
    groups = (LayerGroup(layers=(1,), keys=KeyValueSizes(num_heads=1, head_size=6), keys_of=None, states=(conv,)),)
    model = dataclasses.replace(MODEL, num_layers=2, state_layers=groups)
    memory = DeviceMemory(HostDevice(), "bfloat16")
    buffer = KVBuffer(model, 3, (7, 4), memory)
    sizes = [{name: array.nbytes // 3 for name, array in layer.items()} for layer in buffer.layers]
    keys, own = 2 * 7 * 4 * 2, 4 * 6 * 2
    assert sizes == [
        {"past_key.0": keys, "past_value.0": keys},
        {"past_key.1": own, "past_value.1": own, "past_conv_state.1": 84},
    ]
    assert [state_bytes(model.layer_group(layer), slots, 2) for layer, slots in enumerate((7, 4))] == [2 * keys, 2 * own + 84]
    state, half = buffer.layers[1]["past_conv_state.1"], np.full((1, 7, 3), 0.1, dtype=np.float32)
    memory.device.send(state[1:2].pointer, half)
    np.testing.assert_array_equal(memory.to_host(state)[1:2], half)
    buffer.clear()
    assert not memory.to_host(state).any()


def test_layers_keep_states_or_keys_of_their_own_sizes_or_read_anothers_and_only_states_are_cleared() -> None:
    conv, recurrent = State(name="conv_state", shape=(7, 3)), State(name="recurrent_state", shape=(2, 4, 5))
    groups = (
        LayerGroup(layers=(0, 1), keys=None, keys_of=None, states=(conv, recurrent)),
        LayerGroup(layers=(3,), keys=KeyValueSizes(num_heads=1, head_size=6), keys_of=None, states=(conv,)),
        LayerGroup(layers=(4,), keys=None, keys_of=3, states=()),
    )
    model = dataclasses.replace(MODEL, num_layers=5, state_layers=groups)
    buffer = KVBuffer(model, 5, (7, 0, 4, 2, 7), HostMemory())
    shapes = [{name: array.shape for name, array in layer.items()} for layer in buffer.layers]
    assert shapes == [
        {"past_conv_state.0": (5, 7, 3), "past_recurrent_state.0": (5, 2, 4, 5)},
        {},
        {"past_key.2": (5, 2, 4, 4), "past_value.2": (5, 2, 4, 4)},
        {"past_key.3": (5, 1, 2, 6), "past_value.3": (5, 1, 2, 6), "past_conv_state.3": (5, 7, 3)},
        {},
    ]
    assert [buffer.has_slots(layer) for layer in range(5)] == [True, False, True, True, True]
    assert buffer.source_arrays((3, 4), slice(None)) == {}
    assert keys_read(model, (4, 0)) == ((3, "past_key.3"), (3, "past_value.3"))
    read, own = buffer.source_arrays((4,), slice(2, None)), buffer.layer_arrays(3, slice(2, None))
    assert {*read} == {"present_key.3", "present_value.3"} and np.shares_memory(read["present_key.3"], own["past_key.3"])
    for layer in (0, 2, 3):
        for array in buffer.layer_arrays(layer, slice(2, None)).values():
            array[:] = 1
    buffer.clear()
    for layer in (0, 2, 3):
        for name, array in buffer.layers[layer].items():
            kept = 0 if name.endswith(f"_state.{layer}") else 1
            assert (array[2:] == kept).all() and not array[:2].any()
