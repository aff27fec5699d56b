"""Choose which of a bundle's targets to run, and load its engines."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from skipdecode import bindings
from skipdecode.cache_folder import cache_folder
from skipdecode.cpu import cpu_features, usable_cores
from skipdecode.cuda import CudaDevice
from skipdecode.cuda_driver import gpu_at_hand
from skipdecode.device import Device
from skipdecode.engines import Engine, Engines, Segment, SharingEngine, tensorrt, tensorrt_library
from skipdecode.engines.contract import embed_contract, head_contract, segment_contract
from skipdecode.engines.kernel_cache import KernelCache
from skipdecode.engines.ort import OrtEngine, check_library, prepare_cuda, use_threads
from skipdecode.errors import BundleError, CapacityError, TargetError
from skipdecode.kv_buffer import plan_slots
from skipdecode.manifest import MANIFEST, Manifest, Target
from skipdecode.memory import DeviceMemory, HostMemory, Memory
from skipdecode.prefill import PREFILL_CHUNK
from skipdecode.process_memory import loading
from skipdecode.trace import Trace
from skipdecode.turn_around import TurnAround

PORTABLE = "sm80 and later"  # `Target.machine` of plans built without naming a compute capability


def choose_target(manifest: Manifest, bundle: Path, name: str | None) -> Target:
    """The bundle's target of that name; None: cpu, or its first target if it has no cpu.

    Raises:
        TargetError: the bundle has no such target.
    """
    known = [target.name for target in manifest.targets]
    name = manifest.default_target if name is None else name
    if name not in known:
        raise TargetError(
            f"target {name!r} is not in this bundle", f"choose from {', '.join(known) or 'none'}", where=str(bundle)
        )
    return manifest.targets[known.index(name)]


def load_engines(manifest: Manifest, bundle: Path, target: Target, threads: int | None, trace: Trace | None) -> Engines:
    """Load every engine of `target`.

    Raises:
        TargetError: the engines are for another library, library version, CPU or GPU, or for a device that is missing.
        BundleError: an engine cannot be loaded.
        CapacityError: memory does not hold them all, or `threads` is out of range.
    """
    if target.name in tensorrt_library.LIBRARIES:
        return _load_plans(manifest, bundle, target, trace)
    if target.name not in ("cpu", "cuda") or target.library != "onnxruntime":
        raise TargetError(
            f"this version does not run {target.library} engines for {target.name}",
            "export with --target cpu too",
            where=str(bundle),
        )
    if target.name == "cuda":
        prepare_cuda()
        use_threads(threads)
        device = CudaDevice()
        return load_device_engines(manifest, bundle, target, device, device.turn_around(), trace)
    check_library(target.library_version, bundle)
    if (target.machine, target.cpu_features) != (platform.machine(), cpu_features()):
        raise TargetError(
            f"the engines' weights are laid out for {target.machine} with {' '.join(target.cpu_features)}; this CPU differs",
            "export the model on this machine", where=str(bundle),
        )  # fmt: skip
    use_threads(threads)
    with loading(bundle):
        load_engine = _checking_loader(manifest, bundle, target, lambda path: OrtEngine(path, trace))
        return _load(manifest, bundle, target, HostMemory(), load_engine, threads=usable_cores())


def load_device_engines(
    manifest: Manifest, bundle: Path, target: Target, device: Device, turn_around: TurnAround | None, trace: Trace | None = None
) -> Engines:
    """Load the engines of the cuda target: on a GPU, or on a `HostDevice` to check them without one.

    Args:
        turn_around: the device's turn-around; None: tokens are chosen on the host.

    Raises:
        TargetError: ONNX Runtime cannot use the device.
        BundleError: an engine cannot be loaded.
        CapacityError: memory does not hold them all.
    """
    load_engine = _checking_loader(manifest, bundle, target, lambda path: OrtEngine(path, trace, device=device))
    loaded = _load_on_device(manifest, bundle, target, device, load_engine, threads=usable_cores())
    return dataclasses.replace(loaded, turn_around=turn_around)


def _checking_loader(
    manifest: Manifest, bundle: Path, target: Target, load_engine: Callable[[Path], OrtEngine]
) -> Callable[[Path], OrtEngine]:
    """`load_engine`, extended to compare each file's inputs and outputs with what the manifest calls for."""
    model, floats = manifest.model, "float32" if target.float_bytes == 4 else manifest.dtype
    contracts = {
        bundle / target.embed: embed_contract(model, floats),
        bundle / target.head: head_contract(model, floats),
        **{
            bundle / path: segment_contract(model, floats, layers)
            for path, layers in zip(target.segments, manifest.segments, strict=True)
        },
    }

    def load_checked(path: Path) -> OrtEngine:
        engine = load_engine(path)
        contracts[path].check(engine, path)
        return engine

    return load_checked


def _load_plans(manifest: Manifest, bundle: Path, target: Target, trace: Trace | None) -> Engines:
    installed = tensorrt_library.library(target.name).__version__
    built_for = [] if target.machine == PORTABLE else target.machine.split()
    if installed != target.library_version:
        message = f"the plans were built by {target.name} {target.library_version}, but {installed} is installed"
        raise TargetError(message, _rebuild_remedy(target, built_for), where=str(bundle))
    device = CudaDevice()
    is_served = device.capability in built_for if built_for else int(device.capability.removeprefix("sm")) >= 80
    if not is_served:
        alternative = "" if target.name == "tensorrt" else ", or with --target cuda if that is not supported"
        message = f"the plans are for {target.machine}, but this GPU is {device.capability}"
        raise TargetError(message, _rebuild_remedy(target, [device.capability]) + alternative, where=str(bundle))
    kernels = KernelCache(_kernel_file(bundle, gpu_at_hand().name))
    shared = tensorrt.PlanRuntime(target.name, device, kernels)
    run = device.turn_around()
    engines = plan_engines(manifest, bundle, target, device, run, lambda path: tensorrt.TensorRTEngine(path, shared, trace))
    return dataclasses.replace(engines, after_run=kernels.save)


def _rebuild_remedy(target: Target, capabilities: Sequence[str]) -> str:
    """The remedy: how to export again. `tensorrt` builds for the GPU at hand and takes no capability by name."""
    suffix = f":{','.join(capabilities)}" if capabilities and target.name != "tensorrt" else ""
    return f"export the model again with --target {target.name}{suffix} --force"


def _kernel_file(bundle: Path, gpu: str) -> Path:
    """The file for kernels compiled from the bundle's plans for one kind of GPU; machines with other GPUs may share a home."""
    identity = hashlib.sha256((bundle / MANIFEST).read_bytes() + gpu.encode()).hexdigest()[:24]
    return cache_folder("kernels") / f"{identity}.bin"


def plan_engines(
    manifest: Manifest, bundle: Path, target: Target, device: Device, turn_around: TurnAround | None,
    load_engine: Callable[[Path], Engine],
) -> Engines:  # fmt: skip
    """Load plans: engines with a fixed number of KV buffer slots that take one row per pass over a prompt.

    Args:
        load_engine: loads one of the target's files.
    """
    loaded = _load_on_device(manifest, bundle, target, device, load_engine, threads=1)
    slots = plan_slots(manifest, target)
    return dataclasses.replace(loaded, slots=slots, max_prompt_tokens=PREFILL_CHUNK, turn_around=turn_around)


def _load_on_device(
    manifest: Manifest, bundle: Path, target: Target, device: Device, load_engine: Callable[[Path], Engine], *, threads: int
) -> Engines:
    """As `_load`, with the weight that embedding and head share, if any, once on the device."""
    memory = DeviceMemory(device, manifest.dtype)
    loaded = _load(manifest, bundle, target, memory, load_engine, threads=threads)
    if target.tied_weight is None:
        return loaded
    rows = bindings.tied_rows(manifest.model.vocab_size)
    try:
        stored = np.memmap(bundle / target.tied_weight, dtype=np.uint16, mode="r").reshape(rows, -1)
    except ValueError as error:
        raise BundleError(
            "is not a whole number of rows", "export the model again", where=str(bundle / target.tied_weight)
        ) from error
    weight = memory.floats(stored.shape)
    memory.device.send(weight.pointer, stored)
    shared = {bindings.TIED_WEIGHT: weight}
    embed, head = (SharingEngine(engine=each, weights=shared) for each in (loaded.embed, loaded.head))
    return dataclasses.replace(loaded, embed=embed, head=head)


def _load(
    manifest: Manifest, bundle: Path, target: Target, memory: Memory, load_engine: Callable[[Path], Engine], *, threads: int
) -> Engines:
    """Load each of a target's files with `load_engine`."""
    paths = [bundle / path for path in (target.embed, *target.segments, target.head)]
    try:
        with ThreadPoolExecutor(threads) as pool:  # ONNX Runtime packs quantised weights to compare them
            embed, *segment_engines, head = pool.map(load_engine, paths)
    except MemoryError as error:
        raise CapacityError("does not fit in memory", "free some memory", where=str(bundle)) from error
    segments = tuple(Segment(*pair) for pair in zip(manifest.segments, segment_engines, strict=True))
    return Engines(embed=embed, segments=segments, head=head, memory=memory)
