"""Stands in for TensorRT's runtime where there is no GPU: a plan is run as the graph that it was built from, by ONNX Runtime.

It has the interface that runtime/engines/tensorrt.py uses (for `tensorrt`: without what only TensorRT-RTX has), and refuses
what TensorRT's documentation forbids: a shape outside the profile, an address that is missing or not aligned, an output over
an input that is not its alias, no scratch memory. What it cannot show is whether the real library takes the calls as documented.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorrt_rtx as trt

from skipdecode import manifest as manifests
from skipdecode.engines.ort import OrtEngine, use_threads
from skipdecode.prefill import PREFILL_CHUNK

TYPES = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(int64)": np.int64}
SCRATCH = 4096
Enqueue = Callable[[int, Callable[[], None]], None]  # stream, the work to do on it

DAMAGED = "the plan is damaged"  # what the library logs for a plan that it does not know


def library(bundle: Path, enqueue: Enqueue, name: str = "tensorrt-rtx") -> Any:
    """What stands in for the Python package of a TensorRT target, for the plans of one bundle."""
    use_threads(None)
    made = manifests.read(bundle)
    target = next(each for each in made.targets if each.name == name)
    listed = bundle / "graphs" / f"lowered_{name}.json"
    if not listed.exists():
        # once per bundle: this imports torch, which takes longer than a small model's generation with plans
        from tests.standin.lowered import lower_and_write

        lower_and_write(bundle, made, target, listed)
    known = {
        hashlib.sha256((bundle / path).read_bytes()).digest(): (bundle / graph, most)
        for path, (graph, most) in json.loads(listed.read_text()).items()
    }

    class Runtime:
        def __init__(self, log: Any) -> None:
            self._log = log

        def deserialize_cuda_engine(self, plan: Any) -> Engine | None:
            found = known.get(hashlib.sha256(plan).digest())
            if found is None:
                self._log.log(trt.ILogger.Severity.ERROR, DAMAGED)
                return None
            kind = RtxEngine if target.name == "tensorrt-rtx" else Engine
            return kind(*found, made.limits.max_batch, self._log, enqueue)

    kept = ("ILogger", "TensorIOMode", "ExecutionContextAllocationStrategy", "DataType")
    kept += ("DynamicShapesKernelSpecializationStrategy",) if target.name == "tensorrt-rtx" else ()
    about = {"__name__": target.library, "__version__": target.library_version}
    return SimpleNamespace(Runtime=Runtime, **about, **{name: getattr(trt, name) for name in kept})


class Engine:
    """A plan with the exporter's two profiles (the head: one)."""

    def __init__(self, source: Path, most_tokens: int, max_batch: int, log: Any, enqueue: Enqueue) -> None:
        self.session = OrtEngine(source).session  # not optimised: ONNX Runtime would multiply quantised weights by inputs in int8
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}
        self.log, self.enqueue, self.name = log, enqueue, source.stem
        most = min(PREFILL_CHUNK, most_tokens)
        self._profiles = [{"B": (1, max_batch), "S": (1, 1)}, {"B": (1, 1), "S": (1, most)}]
        self.num_optimization_profiles = 1 if source.stem.endswith("head") else 2
        self.num_io_tensors = len(self.inputs) + len(self.outputs)

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def get_tensor_mode(self, name: str) -> Any:
        return trt.TensorIOMode.INPUT if name in self.inputs else trt.TensorIOMode.OUTPUT

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in self.inputs[name].shape)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        ranges = self._profiles[profile]
        least, most = (tuple(ranges.get(size, (size, size))[bound] for size in self.inputs[name].shape) for bound in (0, 1))
        return [least, least, most]

    def get_tensor_dtype(self, name: str) -> Any:
        kinds = {np.float32: trt.DataType.FLOAT, np.float16: trt.DataType.HALF, np.int64: trt.DataType.INT64}
        return kinds[TYPES[{**self.inputs, **self.outputs}[name].type]]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return name.replace("present_", "past_") if name.startswith(("present_key", "present_value")) else None

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return SCRATCH * (profile + 1)

    def create_runtime_config(self) -> SimpleNamespace:
        return SimpleNamespace(set_execution_context_allocation_strategy=lambda strategy: None)

    def create_execution_context(self, config: Any) -> Context:
        return Context(self)


class RtxEngine(Engine):
    """An engine of TensorRT-RTX, which compiles kernels where it runs."""

    def create_runtime_config(self) -> SimpleNamespace:
        def set_runtime_cache(kernels: Kernels) -> bool:
            config.get_runtime_cache = lambda: kernels
            return True

        config = SimpleNamespace(
            **vars(super().create_runtime_config()), create_runtime_cache=Kernels, get_runtime_cache=Kernels,
            dynamic_shapes_kernel_specialization_strategy=None, set_runtime_cache=set_runtime_cache,
        )  # fmt: skip
        return config

    def create_execution_context(self, config: Any) -> Context:
        return RtxContext(self, config.get_runtime_cache())


class Kernels:
    """A runtime cache that, instead of kernels, keeps which engines have run with how many rows and tokens."""

    def __init__(self) -> None:
        self.used: list[str] = []

    def serialize(self) -> memoryview:
        return memoryview(" ".join(["kernels of", *sorted(set(self.used))]).encode())

    def deserialize(self, blob: bytes) -> bool:
        if not blob.startswith(b"kernels of "):
            return False
        self.used += blob.decode().split()[2:]
        return True


class Context:
    """Keeps what it is given, and refuses to run unless that suffices."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._profile, self._scratch = engine, 0, 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = profile
        self._shapes.clear()
        return True

    def set_device_memory(self, pointer: int, size: int) -> None:
        assert pointer % 256 == 0
        self._scratch = size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self._engine.get_tensor_profile_shape(name, self._profile)
        if len(shape) != len(least) or not all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True)):
            return self._refuse(f"{name}: {shape} is outside {least} .. {most}")
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, pointer: int) -> bool:
        if pointer % 256:
            return self._refuse(f"{name}: {pointer:#x} is not aligned")
        self._addresses[name] = pointer
        return True

    def execute_async_v3(self, stream: int) -> bool:
        engine, addresses = self._engine, dict(self._addresses)
        missing = {*engine.inputs, *engine.outputs} - addresses.keys() | engine.inputs.keys() - self._shapes.keys()
        if missing or self._scratch < engine.get_device_memory_size_for_profile_v2(self._profile):
            return self._refuse(f"lacks {sorted(missing) or 'scratch memory'}")
        aliases = {name: engine.get_aliased_input_tensor(name) for name in engine.outputs}
        for name, alias in aliases.items():
            others = [addresses[each] for each in engine.inputs if each != alias]
            if addresses[name] in others or (alias and addresses[name] != addresses[alias]):
                return self._refuse(f"{name} lies over an input")
        binding = self._bound(addresses)
        engine.enqueue(stream, lambda: engine.session.run_with_iobinding(binding))
        return True

    def _bound(self, addresses: dict[str, int]) -> Any:
        engine, sizes = self._engine, {}
        for name, value in engine.inputs.items():
            sizes.update(zip(value.shape, self._shapes[name], strict=True))
        binding = engine.session.io_binding()
        for values, bind in ((engine.inputs, binding.bind_input), (engine.outputs, binding.bind_output)):
            for name, value in values.items():
                shape = [sizes.get(size, size) for size in value.shape]
                bind(name, "cpu", 0, TYPES[value.type], shape, addresses[name])
        return binding

    def _refuse(self, why: str) -> bool:
        self._engine.log.log(trt.ILogger.Severity.ERROR, f"{self._engine.name}: {why}")
        return False


class RtxContext(Context):
    """A context of TensorRT-RTX, whose work a graph may not be able to capture."""

    allocates = False  # whether it does while it runs, so that no graph can capture it

    def __init__(self, engine: Engine, kernels: Kernels) -> None:
        super().__init__(engine)
        self._kernels = kernels

    def execute_async_v3(self, stream: int) -> bool:
        self._kernels.used.append(f"{self._engine.name}:{sorted(self._shapes.items())}".replace(" ", ""))
        return super().execute_async_v3(stream)

    def is_stream_capturable(self, stream: int) -> bool:
        return not self.allocates
