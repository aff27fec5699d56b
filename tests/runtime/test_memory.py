"""Arrays on the host and on a device."""

from __future__ import annotations

import numpy as np
import pytest

from skipdecode.device import Call, HostArray, HostDevice
from skipdecode.errors import CapacityError
from skipdecode.memory import DeviceMemory, HostMemory, Memory


@pytest.mark.parametrize("memory", [HostMemory(), DeviceMemory(HostDevice(), "float32")], ids=["host", "device"])
def test_one_position_of_each_row_is_copied_out(memory: Memory) -> None:
    numbers = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2)
    rows = memory.floats(numbers.shape)
    if isinstance(memory, DeviceMemory):
        memory.device.send(rows.pointer, numbers)
    else:
        rows[...] = numbers
    chosen = memory.gather_positions(rows, np.array([3, 0, 2]))
    memory.clear(rows)
    np.testing.assert_array_equal(memory.to_host(chosen), numbers[[0, 1, 2], [3, 0, 2]][:, None])


@pytest.mark.parametrize("memory", [HostMemory(), DeviceMemory(HostDevice(), "bfloat16")], ids=["host", "device"])
def test_engines_see_a_host_array_at_once_and_later_changes_when_they_are_sent(memory: Memory) -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    twin, send = memory.twin(array)
    for _ in range(2):
        seen = twin
        if isinstance(memory, DeviceMemory):
            seen = np.zeros_like(array)
            memory.device.fetch(twin.pointer, seen)()
        np.testing.assert_array_equal(seen, array)
        array += 7
        if send is not None:
            send()


class _Slow(HostDevice):
    """A device whose fetches are complete only after they have been waited for."""

    def fetch(self, pointer: int, array: HostArray) -> Call:
        return lambda: super(_Slow, self).fetch(pointer, array)()


@pytest.mark.parametrize(("dtype", "stored"), [("float16", np.float16), ("bfloat16", np.uint16)])
def test_a_devices_results_are_waited_for(dtype: str, stored: type) -> None:
    memory = DeviceMemory(_Slow(), dtype)
    numbers = np.array([[0.5, -2.0, 3.0]], dtype=np.float32)
    array, twin, receive = memory.result(numbers.shape, np.float32)
    memory.device.send(twin.pointer, numbers)
    receive()
    np.testing.assert_array_equal(array, numbers)
    floats = memory.floats(numbers.shape)
    narrow = numbers.view(np.uint32) >> 16 if stored is np.uint16 else numbers
    memory.device.send(floats.pointer, narrow.astype(stored))
    np.testing.assert_array_equal(memory.to_host(floats), numbers)


def test_slices_and_reshapes_of_a_device_array_match_numpys() -> None:
    memory, numbers = DeviceMemory(HostDevice(), "float32"), np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    array = memory.floats(numbers.shape)
    memory.device.send(array.pointer, numbers)
    for rows in (slice(1, 3), slice(2, None), slice(3, 99), slice(3, 1), slice(None)):
        np.testing.assert_array_equal(memory.to_host(array[rows]), numbers[rows])
        assert array[rows].nbytes == numbers[rows].nbytes
    for shape in ((-1, 2), (3, -1), (12,)):
        np.testing.assert_array_equal(memory.to_host(array[1:3].reshape(*shape)), numbers[1:3].reshape(shape))


@pytest.mark.parametrize("numbers", [(1 << 58) + 1, (1 << 62) + 1])  # more than the machine has; more than an address can name
def test_missing_memory_is_reported_in_whole_mebibytes(numbers: int) -> None:
    with pytest.raises(CapacityError, match=f"no memory is left for {(numbers >> 18) + 1} MiB; send fewer rows"):
        HostMemory().floats((numbers,))
