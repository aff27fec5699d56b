"""Engines that are TensorRT plans: execution contexts on one stream, which share one block of scratch memory."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skipdecode import bindings
from skipdecode.device import ALIGNMENT, Block, Call, Device
from skipdecode.engines import tensorrt_library
from skipdecode.engines.kernel_cache import KernelCache
from skipdecode.errors import BundleError, CapacityError, SkipDecodeError, TargetError, shortened
from skipdecode.memory import Array, DeviceArray
from skipdecode.trace import Trace, traced

_KV_PREFIXES = tuple(each for name in (bindings.PAST_KEY, bindings.PAST_VALUE) for each in (name, bindings.present(name)))
NO_MEMORY = re.compile(r"out ?of ?memory|bad_alloc|could not be allocated", re.IGNORECASE)


def make_log(trt: Any, *, warnings: bool = False) -> Any:
    """A logger that keeps the library's messages. A function, because its base class comes from the library.

    Args:
        warnings: whether to keep warnings, too. Errors are kept until `first_error` asks for them.
    """
    severities = trt.ILogger.Severity

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (severities.ERROR, severities.INTERNAL_ERROR):
                self.errors.append(message)
            elif warnings and severity == severities.WARNING:
                self.warnings.append(message)

        def first_error(self) -> str:
            # without a GPU every error is followed by one from the driver, which is not the reason; if memory ran out, it is
            memory = [message for message in self.errors if NO_MEMORY.search(message)]
            reasons = [message for message in self.errors if "Cuda Runtime" not in message]
            first = [*memory, *reasons, *self.errors, "no reason given"][0]
            self.errors.clear()
            return shortened(first, 300)

    return Log()


class PlanRuntime:
    """What the engines of one target share, since they run one after another: library, log, stream and scratch memory.

    Raises:
        TargetError: the library is not installed, or does not start on this machine.
    """

    def __init__(self, target: str, device: Device, kernels: KernelCache | None = None) -> None:
        self.trt = tensorrt_library.library(target)
        self.log = make_log(self.trt)
        try:
            self.runtime = self.trt.Runtime(self.log)
        except TypeError as error:  # how its bindings report a null pointer
            raise self.run_error("its version may need a newer driver: check nvidia-smi") from error
        self.kernels = kernels
        self.device = device
        self.scratch_bytes = 0  # of the engine that needs most
        self._scratch: Block | None = None
        self._staging: dict[str, Block] = {}

    def scratch(self) -> Block:
        """The memory in which any engine computes while it runs. Call this only after all engines are loaded."""
        if self._scratch is None:
            self._scratch = self.device.allocate(self.scratch_bytes)
        return self._scratch

    def staging(self, name: str, nbytes: int) -> Block:
        """At least `nbytes` of memory that all engines share for an input or output of this name; the caller keeps it alive."""
        block = self._staging.get(name)
        if block is None or block.nbytes < nbytes:
            block = self._staging[name] = self.device.allocate(nbytes)
        return block

    def run_error(self, remedy: str) -> SkipDecodeError:
        """The error to raise when the library refuses a run."""
        reason = self.log.first_error()
        if NO_MEMORY.search(reason):
            return CapacityError(
                f"no memory is left to run a plan ({reason})", "send fewer rows or shorter prompts, or free some"
            )
        return TargetError(f"{self.trt.__name__} cannot run a plan ({reason})", remedy)

    def load_error(self, path: Path) -> SkipDecodeError:
        """The error to raise when the library refuses a file."""
        reason, where = self.log.first_error(), str(path)
        if NO_MEMORY.search(reason):
            return CapacityError(f"no memory is left for it ({reason})", "free some, or export a smaller model", where=where)
        if "does not support this compute capability" in reason:  # portable plans also leave out some GPUs (H100, H200)
            return TargetError(f"{self.trt.__name__} does not support this GPU ({reason})", "export with --target cuda")
        return BundleError(f"cannot be loaded ({reason})", "export the model again with the same --target", where=where)


class TensorRTEngine:
    """A plan, ready to be bound.

    Args:
        trace: records what runs, and for how long. Each run is then waited for.

    Raises:
        TargetError: the library does not serve the GPU.
        CapacityError: it does not fit in memory.
        BundleError: the library refuses the file, or the plan does not update KV buffers in place or give logits in fp32.
    """

    def __init__(self, path: Path, shared: PlanRuntime, trace: Trace | None = None) -> None:
        shared.log.errors.clear()  # those of earlier calls
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            engine = shared.runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise shared.load_error(path)
        # attributes are released in this order: contexts before the engine and the library that serve them
        self._contexts: dict[Any, _Context] = {}
        self._engine, self._shared, self._path, self._trace = engine, shared, path, trace
        modes = shared.trt.TensorIOMode
        tensor_names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.input_names = frozenset(name for name in tensor_names if engine.get_tensor_mode(name) == modes.INPUT)
        for name in set(tensor_names) - self.input_names:
            past = bindings.past(name.removeprefix(bindings.PRESENT))
            if _is_kv_buffer(name) and engine.get_aliased_input_tensor(name) != past:
                raise BundleError(f"{name} is not updated in place", "export the model again", where=str(path))
            if name == bindings.LOGITS and engine.get_tensor_dtype(name) != shared.trt.DataType.FLOAT:
                raise BundleError("gives logits in a dtype other than fp32", "export the model again", where=str(path))
        profiles = range(engine.num_optimization_profiles)
        scratch_sizes = [engine.get_device_memory_size_for_profile_v2(profile) for profile in profiles]
        shared.scratch_bytes = max(shared.scratch_bytes, *scratch_sizes)
        self._ranges = [{name: _shape_range(engine, name, profile) for name in self.input_names} for profile in profiles]

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Call:
        """As `Engine.bind`, for arrays on the device.

        TensorRT requires aligned addresses, and may write an output before it has read every input. So an unaligned array goes
        through an aligned copy, and an output at an input's address is written elsewhere and then copied there. KV buffers
        are exempt, because TensorRT knows to update them in place; states are not.
        """
        device, before, after = self._shared.device, [], []
        arrays: dict[str, DeviceArray] = {}
        for name, array in inputs.items():
            if name in self.input_names:
                assert isinstance(array, DeviceArray)
                arrays[name] = array if _is_kv_buffer(name) else self._aligned(name, array)
                if arrays[name] is not array:
                    before.append(_copy(device, array, arrays[name]))
        input_pointers = {array.pointer for array in inputs.values() if isinstance(array, DeviceArray)}
        for name, array in outputs.items():
            assert isinstance(array, DeviceArray)
            arrays[name] = array if _is_kv_buffer(name) else self._aligned(name, array, staged=array.pointer in input_pointers)
            if arrays[name] is not array:
                after.append(_copy(device, arrays[name], array))
        shapes = {name: arrays[name].shape for name in self.input_names}
        context, binding = self._context(shapes), object()

        def run() -> None:
            device.enter()
            for call in before:
                call()
            context.run(binding, arrays, shapes)
            for call in after:
                call()
            if self._trace is not None:
                device.mark()()

        return traced(self._trace, self._path.stem, run, kind="engine")

    def _aligned(self, name: str, array: DeviceArray, *, staged: bool = False) -> DeviceArray:
        if array.pointer % ALIGNMENT == 0 and not staged:
            return array
        return array.with_block(self._shared.staging(name, array.nbytes))

    def _context(self, shapes: Mapping[str, tuple[int, ...]]) -> _Context:
        """A context for these shapes. A decode step's shapes have their own, for a graph to hold; all prompts share one."""
        profiles = [
            index for index, ranges in enumerate(self._ranges)
            if all(_is_within(shapes[name], *ranges[name]) for name in self.input_names)
        ]  # fmt: skip
        if not profiles:
            raise BundleError(f"has no optimisation profile for {shapes}", "export the model again", where=str(self._path))
        profile = profiles[0]
        is_step = profile == 0
        key = (profile, tuple(sorted(shapes.items())) if is_step else None)
        if key not in self._contexts:
            self._contexts[key] = _Context(self._engine, self._shared, profile, shapes if is_step else None)
        return self._contexts[key]


class _Context:
    """An execution context, and the arrays that it was last given.

    Args:
        fixed_shapes: the shapes of all its runs, set only once: setting shapes puts work on the stream, which a graph must not
            record, and passes over prompts of one token alternate with steps. None: each run sets its own.
    """

    def __init__(
        self, engine: Any, shared: PlanRuntime, profile: int, fixed_shapes: Mapping[str, tuple[int, ...]] | None
    ) -> None:
        trt = shared.trt
        shared.log.errors.clear()  # those of earlier calls
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if hasattr(config, "dynamic_shapes_kernel_specialization_strategy"):  # TensorRT-RTX, which compiles kernels here
            if fixed_shapes:  # a graph would keep the fallback kernel that lazy specialisation starts with
                config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
            if shared.kernels is not None:
                shared.kernels.attach(config)
        context = engine.create_execution_context(config)
        if context is None or not context.set_optimization_profile_async(profile, shared.device.stream):
            raise shared.run_error("free GPU memory, or send fewer rows")
        # attributes are released in this order: the context before its engine, and both before the kernels that they use
        self._context, self._engine, self._shared = context, engine, shared
        self._has_fixed_shapes = fixed_shapes is not None
        scratch = shared.scratch()
        context.set_device_memory(scratch.pointer, shared.scratch_bytes)
        self._binding: object | None = None  # stands for the last arrays, which, if stored, would live as long as the engine
        self._capturable = False  # known after the first run
        self._seen_shapes: set[frozenset[tuple[str, tuple[int, ...]]]] = set()  # shapes that it has run
        if fixed_shapes is not None and not all(context.set_input_shape(name, shape) for name, shape in fixed_shapes.items()):
            raise shared.run_error("export the model again")

    def run(self, binding: object, arrays: Mapping[str, DeviceArray], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Run on `arrays`. `binding` stands for arrays and shapes, which are set only if it differs from the last run's."""
        device = self._shared.device
        if device.capturing and not self._capturable:
            raise TargetError("a plan allocates memory while it runs", "export the model again")
        is_new = self._binding is not binding
        if is_new:
            self._shared.log.errors.clear()  # those of earlier calls
            new_shapes = {} if self._has_fixed_shapes else shapes
            accepted = [self._context.set_input_shape(name, shape) for name, shape in new_shapes.items()]
            accepted += [self._context.set_tensor_address(name, array.pointer) for name, array in arrays.items()]
            self._binding = binding if all(accepted) else None
            self._note_shapes(frozenset(shapes.items()))
        if self._binding is None or not self._context.execute_async_v3(device.stream):
            raise self._shared.run_error("check nvidia-smi, and start again")
        if is_new and self._has_fixed_shapes and not device.capturing:
            is_capturable = getattr(self._context, "is_stream_capturable", None)  # only TensorRT-RTX has it
            self._capturable = is_capturable is None or is_capturable(device.stream)

    def _note_shapes(self, shapes: frozenset[tuple[str, tuple[int, ...]]]) -> None:
        """Expect new kernels if these shapes are new: prompts of a new length may have kernels of their own."""
        if self._shared.kernels is not None and shapes not in self._seen_shapes:
            self._seen_shapes.add(shapes)
            self._shared.kernels.expect_more()


def _is_kv_buffer(name: str) -> bool:
    return name.startswith(_KV_PREFIXES)


def _copy(device: Device, source: DeviceArray, target: DeviceArray) -> Call:
    return lambda: device.copy(target.pointer, source.pointer, source.nbytes)


def _shape_range(engine: Any, name: str, profile: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    declared = tuple(engine.get_tensor_shape(name))
    if -1 not in declared:
        return declared, declared
    smallest, _, largest = engine.get_tensor_profile_shape(name, profile)
    return tuple(smallest), tuple(largest)


def _is_within(shape: tuple[int, ...], lows: tuple[int, ...], highs: tuple[int, ...]) -> bool:
    return len(shape) == len(lows) and all(low <= size <= high for size, low, high in zip(shape, lows, highs, strict=True))
