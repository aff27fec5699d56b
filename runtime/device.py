"""What the runtime needs of a device, and the CPU as a device, on which engines made for a GPU can be checked.

All work happens in the order of the device's stream; only `allocate` and waiting involve the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

ALIGNMENT = 256  # bytes; CUDA allocates at multiples of it, and TensorRT asks for them
HostArray = np.ndarray[Any, np.dtype[Any]]
Call = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Memory of a device, freed with the last reference to it."""

    pointer: int  # a multiple of ALIGNMENT
    nbytes: int
    owner: Any


class Device(Protocol):
    """One device. Host arrays are contiguous."""

    name: str  # as ONNX Runtime calls it
    stream: int  # a cudaStream_t; 0 where there is none
    capturing: bool  # whether `capture` is recording

    def enter(self) -> None:
        """Make this the device that libraries use on this thread."""

    def allocate(self, nbytes: int) -> Block:
        """Allocate `nbytes` of zeros.

        Raises:
            CapacityError: less memory is left.
        """

    def send(self, pointer: int, array: HostArray) -> None:
        """Copy `array` from the host to `pointer`; the caller may change it as soon as this returns."""

    def mirror(self, shape: tuple[int, ...], dtype: Any) -> HostArray:
        """Zeros on the host, at an address that the device can also read and write.

        Raises:
            CapacityError: as `allocate`.
        """

    def fetch(self, pointer: int, array: HostArray) -> Call:
        """Start a copy from `pointer` to an array made by `mirror`; the returned call waits for it."""

    def mark(self) -> Call:
        """A call that waits until all work enqueued so far is done."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` from `source` to `target` within the device; the two must not overlap."""

    def clear(self, pointer: int, nbytes: int) -> None:
        """Write `nbytes` of zeros."""

    def capture(self, calls: Call) -> Call:
        """Record the work that `calls` enqueues without doing it; the returned call does all of it, any number of times.

        The caller keeps the memory that `calls` refers to alive.
        """


class HostDevice:
    """The CPU as a device: its memory is the host's, and a captured call is the call itself."""

    name, stream, capturing = "cpu", 0, False

    def enter(self) -> None:
        """As `Device.enter`."""

    def allocate(self, nbytes: int) -> Block:
        """As `Device.allocate`."""
        memory = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
        return Block(pointer=memory.ctypes.data + -memory.ctypes.data % ALIGNMENT, nbytes=nbytes, owner=memory)

    def send(self, pointer: int, array: HostArray) -> None:
        """As `Device.send`."""
        ctypes.memmove(pointer, array.ctypes.data, array.nbytes)

    def mirror(self, shape: tuple[int, ...], dtype: Any) -> HostArray:
        """As `Device.mirror`."""
        return np.zeros(shape, dtype)

    def fetch(self, pointer: int, array: HostArray) -> Call:
        """As `Device.fetch`."""
        ctypes.memmove(array.ctypes.data, pointer, array.nbytes)
        return self.mark()

    def mark(self) -> Call:
        """As `Device.mark`."""
        return lambda: None

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """As `Device.copy`."""
        ctypes.memmove(target, source, nbytes)

    def clear(self, pointer: int, nbytes: int) -> None:
        """As `Device.clear`."""
        ctypes.memset(pointer, 0, nbytes)

    def capture(self, calls: Call) -> Call:
        """As `Device.capture`."""
        return calls
