"""Which of a bundle's targets runs here, and its engines."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from skipdecode.cpu import cpu_features
from skipdecode.decoder import Engines
from skipdecode.engines.ort import OrtEngine, check_library, check_provider, use_threads
from skipdecode.errors import BundleError, TargetError
from skipdecode.manifest import Manifest, Target
from skipdecode.memory import DeviceMemory, HostMemory, Memory
from skipdecode.process_memory import loading
from skipdecode.trace import Trace

_RUNS = ("cpu", "cuda")  # the targets that this version runs, the first one first


def choose_target(manifest: Manifest, bundle: Path, name: str | None) -> Target:
    """The bundle's target of that name; None: cpu, else the first that this version runs.

    Raises:
        TargetError: the bundle has no such target, or this version does not run it.
    """
    known = [target.name for target in manifest.targets]
    if name is None:
        name = next((each for each in (*_RUNS, *known) if each in known), _RUNS[0])
    if name not in known:
        raise TargetError(
            f"target {name!r} is not in this bundle", f"choose from {', '.join(known) or 'none'}", where=str(bundle)
        )
    target = manifest.targets[known.index(name)]
    if name not in _RUNS:
        raise TargetError(
            f"engines for {name} ({target.machine}) are compiled by this version, not run by it",
            f"export with --target {_RUNS[0]} too", where=str(bundle),
        )  # fmt: skip
    return target


def load_engines(manifest: Manifest, bundle: Path, target: Target, threads: int | None, trace: Trace | None) -> Engines:
    """Load every engine of `target`.

    Raises:
        TargetError: engines of another library version or CPU, or for a device that is not here.
        BundleError: an engine that cannot be loaded, or not in this memory.
    """
    if target.name == "cuda":
        check_provider("cuda")
        use_threads(threads)
        return load_device_engines(manifest, bundle, target, "cuda", trace)
    check_library(target.library_version)
    if (target.machine, target.cpu_features) != (platform.machine(), cpu_features()):
        raise TargetError(
            f"the engines' weights are laid out for {target.machine} with {' '.join(target.cpu_features)}; this CPU differs",
            "export the model on this machine", where=str(bundle),
        )  # fmt: skip
    use_threads(threads)
    with loading(bundle):
        return _load(manifest, bundle, target, lambda path: OrtEngine(path, trace), HostMemory())


def load_device_engines(manifest: Manifest, bundle: Path, target: Target, device: str, trace: Trace | None = None) -> Engines:
    """Load the engines of the cuda target on `device`: cuda, or cpu to check them where there is no GPU.

    Raises:
        TargetError: the device is not there.
        BundleError: an engine that cannot be loaded, or not in this memory.
    """
    memory = DeviceMemory(device, manifest.dtype)
    return _load(manifest, bundle, target, lambda path: OrtEngine(path, trace, device=device, optimized=False), memory)


def _load(manifest: Manifest, bundle: Path, target: Target, engine: Callable[[Path], OrtEngine], memory: Memory) -> Engines:
    paths = [bundle / path for path in (target.embed, *target.segments, target.head)]
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # quantised weights are packed while they load
            embed, *segments, head = pool.map(engine, paths)
    except MemoryError as error:
        raise BundleError("does not fit in memory", "free some", where=str(bundle)) from error
    return Engines(embed=embed, segments=tuple(zip(manifest.segments, segments, strict=True)), head=head, memory=memory)
