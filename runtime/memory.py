"""Where an engine's arrays live: on the host, as numpy arrays, or on a device that ONNX Runtime reaches.

Both kinds of memory hand out arrays that can be sliced along their first axis and reshaped, at fixed addresses. What Python
writes (token ids, positions, lengths) has a twin on the device: the same array on the host, a copy that is sent elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnxruntime as ort

from skipdecode.errors import CapacityError

HostArray = np.ndarray[Any, np.dtype[Any]]
_BFLOAT16 = 16  # ONNX's number of it; numpy has no such dtype
_FLOATS: dict[str, tuple[Any, Any]] = {  # dtype -> (as ONNX Runtime takes it, of the same size in numpy)
    "float32": (np.float32, np.float32),
    "float16": (np.float16, np.float16),
    "bfloat16": (_BFLOAT16, np.uint16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArray:
    """A contiguous array, or a part of one, on a device."""

    owner: Any  # the OrtValue that keeps the memory
    device: str
    pointer: int
    shape: tuple[int, ...]
    element_type: Any  # a numpy type, or ONNX's number of one
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of this part."""
        return math.prod(self.shape) * self.itemsize

    def __getitem__(self, rows: slice) -> DeviceArray:
        """Some of the first axis, contiguous."""
        start, stop, step = rows.indices(self.shape[0])
        assert step == 1, "only contiguous parts"
        offset = start * math.prod(self.shape[1:]) * self.itemsize
        return self._like(self.pointer + offset, (max(0, stop - start), *self.shape[1:]))

    def reshape(self, *shape: int) -> DeviceArray:
        """The same memory in another shape."""
        assert math.prod(shape) == math.prod(self.shape), f"{self.shape} is not {shape}"
        return self._like(self.pointer, shape)

    def _like(self, pointer: int, shape: tuple[int, ...]) -> DeviceArray:
        return replace(self, pointer=pointer, shape=shape)


Array = HostArray | DeviceArray


class HostMemory:
    """numpy arrays, floats in fp32: engines read and write what Python sees."""

    def floats(self, shape: tuple[int, ...]) -> Any:
        """Zeros of the engines' float type."""
        return np.zeros(shape, dtype=np.float32)

    def twin(self, array: HostArray) -> tuple[Any, Callable[[], None] | None]:
        """`array` as engines see it, and what makes them see what was written to it since; None where nothing need be done."""
        return array, None

    def result(self, array: HostArray) -> tuple[Any, Callable[[], None] | None]:
        """The same for an array that an engine writes, and what brings it back."""
        return array, None

    def to_host(self, array: Any) -> HostArray:
        """An array of `floats`, in fp32."""
        return np.asarray(array)


class DeviceMemory:
    """Memory of one device.

    Args:
        device: `cuda`; `cpu` is a device too, on which engines made for another can be checked.
        dtype: of the engines' floats: float16, bfloat16.
    """

    def __init__(self, device: str, dtype: str) -> None:
        self._device, self._dtype = device, dtype

    def floats(self, shape: tuple[int, ...]) -> DeviceArray:
        """Zeros of the engines' float type.

        Raises:
            CapacityError: the device has not this much memory.
        """
        element_type, stored = _FLOATS[self._dtype]
        return self._array(np.zeros(shape, dtype=stored), element_type)

    def twin(self, array: HostArray) -> tuple[Any, Callable[[], None] | None]:
        """As `HostMemory.twin`."""
        twin = self._array(array, array.dtype.type)
        return twin, lambda: twin.owner.update_inplace(array)

    def result(self, array: HostArray) -> tuple[Any, Callable[[], None] | None]:
        """As `HostMemory.result`."""
        twin = self._array(array, array.dtype.type)

        def receive() -> None:
            array[...] = twin.owner.numpy()

        return twin, receive

    def to_host(self, array: DeviceArray) -> HostArray:
        """An array of `floats`, in fp32. Copies the whole of what `array` is a part of: for checks, not for loops."""
        whole = array.owner.numpy().reshape(-1)
        first = (array.pointer - array.owner.data_ptr()) // array.itemsize
        part = whole[first : first + math.prod(array.shape)].reshape(array.shape)
        if self._dtype == "bfloat16":
            part = (part.astype(np.uint32) << 16).view(np.float32)  # the upper half of an fp32
        return np.asarray(part, dtype=np.float32)

    def _array(self, values: HostArray, element_type: Any) -> DeviceArray:
        try:
            owner = ort.OrtValue.ortvalue_from_numpy(values, self._device, 0)
        except RuntimeError as error:
            raise CapacityError(
                f"{self._device} has no {values.nbytes >> 20} MiB left for a buffer",
                "send fewer rows, shorter prompts, or ask for fewer new tokens",
            ) from error
        return DeviceArray(
            owner=owner, device=self._device, pointer=owner.data_ptr(), shape=values.shape, element_type=element_type,
            itemsize=values.itemsize,
        )  # fmt: skip


Memory = HostMemory | DeviceMemory
