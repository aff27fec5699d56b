"""Where an engine's arrays live: on the host, as numpy arrays, or on a device.

Both kinds of memory hand out arrays that can be sliced along their first axis and reshaped, at fixed addresses. What Python
writes (token ids, positions, lengths) has a twin that engines read: the same array on the host, or a copy on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skipdecode.device import Block, Call, Device, HostArray
from skipdecode.errors import CapacityError

_BFLOAT16 = 16  # ONNX's number for the type, which numpy does not have
_FLOATS: dict[str, tuple[Any, Any]] = {  # dtype -> (type as ONNX Runtime takes it, numpy type of the same size)
    "float32": (np.float32, np.float32),
    "float16": (np.float16, np.float16),
    "bfloat16": (_BFLOAT16, np.uint16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArray:
    """A contiguous array, or a part of one, on a device."""

    owner: Any  # keeps the memory alive
    device: str  # as ONNX Runtime calls it
    pointer: int
    shape: tuple[int, ...]
    element_type: Any  # a numpy type, or ONNX's number for a type
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of this part."""
        return math.prod(self.shape) * self.itemsize

    def __getitem__(self, rows: slice) -> DeviceArray:
        """A contiguous part along the first axis."""
        start, stop, step = rows.indices(self.shape[0])
        assert step == 1, "only contiguous parts"
        offset = start * math.prod(self.shape[1:]) * self.itemsize
        return self._like(self.pointer + offset, (max(0, stop - start), *self.shape[1:]))

    def reshape(self, *shape: int) -> DeviceArray:
        """The same memory in another shape; one size may be -1, as in numpy."""
        known = math.prod(size for size in shape if size != -1)
        whole = tuple(math.prod(self.shape) // known if size == -1 else size for size in shape)
        assert math.prod(whole) == math.prod(self.shape), f"{self.shape} is not {shape}"
        return self._like(self.pointer, whole)

    def with_block(self, block: Block) -> DeviceArray:
        """An array of the same shape and type in `block`. Contents are not copied."""
        return replace(self, owner=block, pointer=block.pointer)

    def _like(self, pointer: int, shape: tuple[int, ...]) -> DeviceArray:
        return replace(self, pointer=pointer, shape=shape)


Array = HostArray | DeviceArray
FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class HostMemory:
    """Memory of the host: numpy arrays with floats in fp32, which engines read and write directly."""

    def floats(self, shape: tuple[int, ...]) -> HostArray:
        """Zeros of the engines' float type.

        Raises:
            CapacityError: the machine has too little memory.
        """
        return _zeros(shape, np.float32)

    def wide_floats(self, shape: tuple[int, ...]) -> HostArray:
        """Zeros in fp32, whatever the engines' float type; otherwise as `floats`."""
        return _zeros(shape, np.float32)

    def twin(self, array: HostArray) -> tuple[HostArray, None]:
        """`array` as engines see it, and a call that sends them what the host writes later; None: they see it at once."""
        return array, None

    def result(self, shape: tuple[int, ...], dtype: Any) -> tuple[HostArray, HostArray, None]:
        """An array that an engine writes: as the host sees it, as engines see it, and a call that brings it to the host."""
        array = _zeros(shape, dtype)
        return array, array, None

    def clear(self, array: Any) -> None:
        """Write zeros to an array made by `floats` or `wide_floats`, or to a part of one."""
        array[...] = 0

    def gather_positions(self, rows: Any, positions: IntArray) -> Any:
        """Copy one position of each row of `rows` [B,S,H] to a new array [B,1,H]."""
        return rows[np.arange(len(positions)), positions][:, None]

    def to_host(self, array: Any) -> HostArray:
        """An array made by `floats` or `wide_floats`, as a numpy array in fp32."""
        return np.asarray(array)


class DeviceMemory:
    """Memory of one device.

    Args:
        dtype: the engines' float type, float16 or bfloat16.
    """

    def __init__(self, device: Device, dtype: str) -> None:
        self.device, self._dtype = device, dtype

    def floats(self, shape: tuple[int, ...]) -> DeviceArray:
        """Zeros of the engines' float type.

        Raises:
            CapacityError: the device has too little memory.
        """
        return self._floats(shape, self._dtype)

    def wide_floats(self, shape: tuple[int, ...]) -> DeviceArray:
        """As `HostMemory.wide_floats`."""
        return self._floats(shape, "float32")

    def twin(self, array: HostArray) -> tuple[DeviceArray, Call]:
        """As `HostMemory.twin`."""
        twin = self._array(array.shape, array.dtype.type, array.itemsize)

        def send() -> None:
            self.device.send(twin.pointer, array)

        send()
        return twin, send

    def result(self, shape: tuple[int, ...], dtype: Any) -> tuple[HostArray, DeviceArray, Call]:
        """As `HostMemory.result`."""
        array = self.device.mirror(shape, dtype)
        twin = self._array(shape, dtype, array.itemsize)
        return array, twin, lambda: self.device.fetch(twin.pointer, array)()

    def clear(self, array: DeviceArray) -> None:
        """As `HostMemory.clear`."""
        self.device.clear(array.pointer, array.nbytes)

    def gather_positions(self, rows: DeviceArray, positions: IntArray) -> DeviceArray:
        """As `HostMemory.gather_positions`."""
        gathered = self.floats((rows.shape[0], 1, rows.shape[2]))
        for row, position in enumerate(positions.tolist()):
            source = rows[row : row + 1].reshape(*rows.shape[1:])[position : position + 1]
            self.device.copy(gathered[row : row + 1].pointer, source.pointer, source.nbytes)
        return gathered

    def to_host(self, array: DeviceArray) -> HostArray:
        """As `HostMemory.to_host`."""
        stored = next(stored for element_type, stored in _FLOATS.values() if element_type == array.element_type)
        part = self.device.mirror(array.shape, stored)
        self.device.fetch(array.pointer, part)()
        if array.element_type == _BFLOAT16:
            part = (part.astype(np.uint32) << 16).view(np.float32)  # bf16 is the upper half of an fp32
        return np.asarray(part, dtype=np.float32)

    def _floats(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        element_type, stored = _FLOATS[dtype]
        return self._array(shape, element_type, np.dtype(stored).itemsize)

    def _array(self, shape: tuple[int, ...], element_type: Any, itemsize: int) -> DeviceArray:
        block = self.device.allocate(math.prod(shape) * itemsize)
        return DeviceArray(
            owner=block, device=self.device.name, pointer=block.pointer, shape=shape, element_type=element_type, itemsize=itemsize
        )


Memory = HostMemory | DeviceMemory


def _zeros(shape: tuple[int, ...], dtype: Any) -> HostArray:
    try:
        return np.zeros(shape, dtype)
    except (MemoryError, ValueError) as error:  # ValueError: larger than the address space
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        remedy = "send fewer rows or shorter prompts, or ask for fewer tokens"
        raise CapacityError(f"no memory is left for {-(-nbytes >> 20)} MiB", remedy) from error
