"""Which of a bundle's targets runs here, and its engines."""

from __future__ import annotations

import platform
from pathlib import Path

from skipdecode.cpu import cpu_features
from skipdecode.decoder import Engines
from skipdecode.engines.ort import OrtEngine, check_library, release_loading_memory, use_threads
from skipdecode.errors import BundleError, TargetError
from skipdecode.manifest import Manifest, Target
from skipdecode.trace import Trace

_RUNS = "cpu"  # the target that this version runs


def choose_target(manifest: Manifest, bundle: Path, name: str | None) -> Target:
    """The bundle's target of that name; None: cpu.

    Raises:
        TargetError: the bundle has no such target, or this version does not run it.
    """
    known = [target.name for target in manifest.targets]
    if name is None:
        name = _RUNS if _RUNS in known else known[0] if known else _RUNS
    if name not in known:
        raise TargetError(
            f"target {name!r} is not in this bundle", f"choose from {', '.join(known) or 'none'}", where=str(bundle)
        )
    target = manifest.targets[known.index(name)]
    if name != _RUNS:
        raise TargetError(
            f"engines for {name} ({target.machine}) are compiled by this version, not run by it",
            f"export with --target {_RUNS} too", where=str(bundle),
        )  # fmt: skip
    return target


def load_engines(manifest: Manifest, bundle: Path, target: Target, threads: int | None, trace: Trace | None) -> Engines:
    """Load every engine of `target`.

    Raises:
        TargetError: engines of another library version or CPU.
        BundleError: an engine that cannot be loaded, or not in this memory.
    """
    check_library(target.library_version)
    if (target.machine, target.cpu_features) != (platform.machine(), cpu_features()):
        raise TargetError(
            f"the engines' weights are laid out for {target.machine} with {' '.join(target.cpu_features)}; this CPU differs",
            "export the model on this machine", where=str(bundle),
        )  # fmt: skip
    use_threads(threads)
    try:
        engines = Engines(
            embed=OrtEngine(bundle / target.embed, trace),
            segments=tuple(
                (layers, OrtEngine(bundle / path, trace)) for layers, path in zip(manifest.segments, target.segments, strict=True)
            ),
            head=OrtEngine(bundle / target.head, trace),
        )
    except MemoryError as error:
        raise BundleError("does not fit in memory", "free some", where=str(bundle)) from error
    release_loading_memory()
    return engines
