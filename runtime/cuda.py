"""An NVIDIA GPU through its driver: memory, one stream, graphs, and the turn-around's kernel (NVIDIA's cuda-python)."""

from __future__ import annotations

import ctypes
import logging
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skipdecode.cuda_driver import MEMORY_REMEDY, capability_of, checked, first_gpu
from skipdecode.device import Block, Call, HostArray
from skipdecode.errors import CapacityError, TargetError
from skipdecode.turn_around import KERNEL, THREADS, SkdTurnaround, TurnAround, ptx

_EMPTY_KERNEL = b".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry nothing() { ret; }\n\0"

logger = logging.getLogger(__name__)

_spare_objects: list[_DriverObjects] = []  # left by devices that no longer exist


class CudaDevice:
    """The first GPU that this process sees, in the context that CUDA's runtime (ONNX Runtime, TensorRT, torch) also uses.

    Raises:
        TargetError: cuda-python, the driver or a GPU is missing.
    """

    name = "cuda"

    def __init__(self) -> None:
        self._driver, self._device = driver, device = first_gpu()
        self._context = checked(driver, driver.cuDevicePrimaryCtxRetain(device))
        try:
            self._objects = _spare_objects.pop()
        except IndexError:
            self._objects = _DriverObjects(stream=self._call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        weakref.finalize(self, _spare_objects.append, self._objects)
        self._stream = self._objects.stream
        self.stream = int(self._stream)
        self.capturing = self._second_context_touched = False
        self._event_flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        host_pages = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
        self._reads_host_pages = bool(self._call(driver.cuDeviceGetAttribute, host_pages, device))

    @property
    def capability(self) -> str:
        """The GPU's compute capability: sm89."""
        return capability_of(self._driver, self._device)

    def enter(self) -> None:
        """As `Device.enter`: sets the context, which is per thread."""
        self._driver.cuCtxSetCurrent(self._context)

    def allocate(self, nbytes: int) -> Block:
        """As `Device.allocate`."""
        driver = self._driver
        try:
            pointer = self._call(driver.cuMemAlloc, max(1, nbytes))
        except CapacityError as error:
            free, _ = self._call(driver.cuMemGetInfo)
            what = f"the GPU has no room for a buffer of {nbytes >> 20} MiB ({free >> 20} MiB are free)"
            raise CapacityError(what, MEMORY_REMEDY) from error
        block = Block(pointer=int(pointer), nbytes=nbytes, owner=_FinalizerTarget())
        weakref.finalize(block.owner, _free, driver, self._context, driver.cuMemFree, pointer)
        self.clear(block.pointer, nbytes)
        return block

    def send(self, pointer: int, array: HostArray) -> None:
        """As `Device.send`: the driver has staged pageable memory when it returns, unless the GPU reads host pages itself."""
        if array.nbytes:
            self._call(self._driver.cuMemcpyHtoDAsync, pointer, array.ctypes.data, array.nbytes, self._stream)
            if self._reads_host_pages:  # as a GH200 does
                self.mark()()

    def mirror(self, shape: tuple[int, ...], dtype: Any) -> HostArray:
        """As `Device.mirror`: pinned memory, which unified addressing also maps for the GPU."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        try:
            pointer = self._call(self._driver.cuMemAllocHost, nbytes)
        except CapacityError as error:
            what = f"the host has no room for {-(-nbytes >> 20)} MiB of pinned memory"
            raise CapacityError(what, "send fewer rows, ask for fewer tokens, or free some memory") from error
        memory = (ctypes.c_byte * nbytes).from_address(int(pointer))
        weakref.finalize(memory, _free, self._driver, self._context, self._driver.cuMemFreeHost, pointer)
        array: HostArray = np.frombuffer(memory, dtype=dtype).reshape(shape)
        array[...] = 0
        return array

    def fetch(self, pointer: int, array: HostArray) -> Call:
        """As `Device.fetch`."""
        self._call(self._driver.cuMemcpyDtoHAsync, array.ctypes.data, pointer, array.nbytes, self._stream)
        return self.mark()

    def mark(self) -> Call:
        """As `Device.mark`: an event."""
        driver = self._driver
        events = self._objects.events
        mark = _Mark(self, events.pop() if events else self._call(driver.cuEventCreate, self._event_flags))
        self._call(driver.cuEventRecord, mark.event, self._stream)  # if this fails, the mark releases its event
        return mark

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """As `Device.copy`."""
        self._call(self._driver.cuMemcpyDtoDAsync, target, source, nbytes, self._stream)

    def clear(self, pointer: int, nbytes: int) -> None:
        """As `Device.clear`."""
        if nbytes:
            self._call(self._driver.cuMemsetD8Async, pointer, 0, nbytes, self._stream)

    def capture(self, calls: Call) -> Call:
        """As `Device.capture`: a CUDA graph.

        Raises:
            TargetError: `calls` did nothing, or something that cannot be captured or replayed.
            CapacityError: there is no memory for the graph.
        """
        driver = self._driver
        if not self._second_context_touched:
            self._touch_second_context()
        graph = self._record_graph(calls)
        try:
            self._check_repeatable(graph)
            executable = self._call(driver.cuGraphInstantiate, graph, 0)
        finally:
            self._call(driver.cuGraphDestroy, graph)
        stream, call = self._stream, self._call

        def replay() -> None:
            call(driver.cuGraphLaunch, executable, stream)

        weakref.finalize(replay, _free, driver, self._context, driver.cuGraphExecDestroy, executable)
        return replay

    def _touch_second_context(self) -> None:
        """Run a kernel in a second context of this process, once, after the engines' kernels have run.

        From then on the GPU takes 0.35 us less between two kernels (H100, H200; why is not known), as it does after another
        process has used it. This takes 0.2 s and makes a step of OPT-1.3B 1.07x as fast, one of OPT-6.7B 1.04x.
        """
        self._second_context_touched = True
        driver = self._driver
        try:
            context = checked(driver, driver.cuCtxCreate(None, 0, self._device))
            try:
                module = checked(driver, driver.cuModuleLoadData(_EMPTY_KERNEL))
                kernel = checked(driver, driver.cuModuleGetFunction(module, b"nothing"))
                checked(driver, driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
                checked(driver, driver.cuCtxSynchronize())
            finally:
                driver.cuCtxDestroy(context)
                self.enter()
        except (CapacityError, TargetError) as error:
            logger.info("no second context to speed up decode steps: %s", error)

    def _record_graph(self, calls: Call) -> Any:
        """Record what `calls` does as a graph. The stream leaves capture mode whatever `calls` raises."""
        driver = self._driver
        self._call(driver.cuStreamBeginCapture, self._stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        self.capturing = True
        try:
            calls()
        except BaseException:
            _, graph = driver.cuStreamEndCapture(self._stream)  # its status for a broken capture is not the reason
            driver.cuGraphDestroy(graph)
            raise
        finally:
            self.capturing = False
        return self._call(driver.cuStreamEndCapture, self._stream)

    def _check_repeatable(self, graph: Any) -> None:
        """Refuse a graph that needs what the host had while it was recorded: nothing keeps it, and a replay would not notice."""
        driver, call, kinds = self._driver, self._call, self._driver.CUgraphNodeType
        _, count = call(driver.cuGraphGetNodes, graph)
        if not count:
            raise TargetError("a step's graph is empty")
        for node in call(driver.cuGraphGetNodes, graph, count)[0]:
            kind = call(driver.cuGraphNodeGetType, node)
            if kind == kinds.CU_GRAPH_NODE_TYPE_HOST:
                raise TargetError("a step's graph calls the host")
            is_copy = kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY
            if is_copy and not self._reads_device_memory(call(driver.cuGraphMemcpyNodeGetParams, node)):
                raise TargetError("a step's graph copies from host memory")

    def _reads_device_memory(self, copy: Any) -> bool:
        kinds, attributes = self._driver.CUmemorytype, self._driver.CUpointer_attribute
        if copy.srcMemoryType == kinds.CU_MEMORYTYPE_HOST:
            return False
        # ask for the address's own type: under unified addressing a copy may declare pinned host memory as the device's
        kind = self._call(self._driver.cuPointerGetAttribute, attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, copy.srcDevice)
        return bool(kind == kinds.CU_MEMORYTYPE_DEVICE)

    def turn_around(self) -> TurnAround:
        """The turn-around's kernel, from the PTX that comes with this package; the driver compiles it for the GPU."""
        driver, objects = self._driver, self._objects
        if objects.module is None:
            objects.module = self._call(driver.cuModuleLoadData, ptx() + b"\0")
        if objects.turn_around is None:
            objects.turn_around = self._call(driver.cuModuleGetFunction, objects.module, KERNEL.encode())
        kernel = objects.turn_around

        def run(state: SkdTurnaround) -> None:
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(state))
            grid, block = (state.rows, 1, 1), (THREADS, 1, 1)
            self._call(driver.cuLaunchKernel, kernel, *grid, *block, 0, self._stream, ctypes.addressof(arguments), 0)

        return run

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Make a driver call in this device's context."""
        self.enter()
        return checked(self._driver, function(*arguments))


@dataclass(slots=True, kw_only=True)
class _DriverObjects:
    """Driver objects that one device leaves to the next. A stream is never destroyed: its engines may outlive the device."""

    stream: Any
    events: list[Any] = field(default_factory=list)  # those that nobody waits for; each is created once and reused
    module: Any = None  # with the turn-around's kernel, once it is loaded
    turn_around: Any = None  # the kernel, once it has been looked up; where that fails, the module is kept for the next attempt


class _FinalizerTarget:
    """An object for a finalizer to watch."""

    __slots__ = ("__weakref__",)


class _Mark:
    """Waits for an event, and releases it for reuse once nothing refers to the mark any more."""

    __slots__ = ("_device", "event")

    def __init__(self, device: CudaDevice, event: Any) -> None:
        self._device, self.event = device, event

    def __call__(self) -> None:
        self._device._call(self._device._driver.cuEventSynchronize, self.event)

    def __del__(self) -> None:
        self._device._objects.events.append(self.event)


def _free(driver: Any, context: Any, function: Callable[..., Any], handle: Any) -> None:
    driver.cuCtxSetCurrent(context)
    function(handle)
