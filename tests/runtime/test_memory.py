"""Arrays on the host and on a device."""

from __future__ import annotations

import numpy as np
import pytest

from skipdecode.device import HostDevice
from skipdecode.memory import DeviceMemory, HostMemory, Memory


@pytest.mark.parametrize("memory", [HostMemory(), DeviceMemory(HostDevice(), "float32")], ids=["host", "device"])
def test_a_position_of_each_row_is_copied_out(memory: Memory) -> None:
    numbers = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2)
    rows = memory.floats(numbers.shape)
    if isinstance(memory, DeviceMemory):
        memory.device.send(rows.pointer, numbers)
    else:
        rows[...] = numbers
    chosen = memory.chosen(rows, np.array([3, 0, 2]))
    memory.clear(rows)
    np.testing.assert_array_equal(memory.to_host(chosen), numbers[[0, 1, 2], [3, 0, 2]][:, None])
