"""What an export reuses from the bundle that it replaces: plans made from the same content, and TensorRT's kernel timings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from importlib import metadata
from pathlib import Path

import onnx_ir as ir

from skipdecode import manifest
from skipdecode.errors import BundleError
from skipdecode.graph_passes import compile_tensorrt
from skipdecode.graph_passes.compile_tensorrt import PlanRequest
from skipdecode.graph_passes.mapped import release_pages

KEYS = "keys.json"  # plan's file -> SHA-256 of everything it was built from
TIMING_CACHE = "timing.cache"  # TensorRT's kernel timings, so that the next build need not repeat them; TensorRT-RTX takes none


def content_key(request: PlanRequest, lowered: ir.Model, version: str, gpus: tuple[str, str]) -> str:
    """SHA-256 of everything that a plan is made from: library, GPUs, profiles, options, builder code, graph and weights."""
    settings = dataclasses.asdict(dataclasses.replace(request, source="", plan="", timing_cache=None))
    # the whole source file: every builder setting is in it or is polygraphy's default, and a list of settings could miss one
    builder_code = [Path(compile_tensorrt.__file__).read_text(encoding="utf-8"), metadata.version("polygraphy")]
    digest = hashlib.sha256(json.dumps([version, gpus, builder_code, settings]).encode())
    digest.update(ir.to_proto(lowered).SerializeToString(deterministic=True))
    for _, value in sorted(lowered.graph.initializers.items()):
        if isinstance(value.const_value, ir.ExternalTensor):
            digest.update(value.const_value.tobytes())
            release_pages(value.const_value)
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class KnownPlan:
    """A plan in a bundle that another export may replace at any time."""

    path: Path
    identity: tuple[int, ...]  # of the file seen there; a file of the same name with another identity is another plan

    @classmethod
    def at(cls, path: Path) -> KnownPlan:
        """The plan that is at `path` now."""
        return cls(path, manifest.file_identity(path))


def known_plans(bundle: Path, folder: str) -> dict[str, KnownPlan]:
    """Content key -> plan, for the plans that match the bundle's manifest; empty if the bundle cannot be read."""
    try:
        files = {file.path: file for file in manifest.read(bundle).files if file.path.startswith(f"{folder}/")}
        plans = {path: KnownPlan.at(bundle / path) for path in files}  # before hashing: a later swap must show
        intact = [path for path, file in files.items() if manifest.describe_file(bundle, path) == file]
        if f"{folder}/{KEYS}" not in intact:
            return {}
        keys = json.loads((bundle / folder / KEYS).read_text(encoding="utf-8"))
        return {str(key): plans[f"{folder}/{name}"] for name, key in keys.items() if f"{folder}/{name}" in intact}
    except (OSError, ValueError, AttributeError, BundleError):
        return {}


def take_over(plan: KnownPlan, path: Path) -> bool:
    """Link or copy the known `plan` to `path`; False, with nothing at `path`, if its bundle has been replaced meanwhile."""
    try:
        _link_or_copy(plan.path, path)
        if KnownPlan.at(plan.path) == plan:
            return True
    except FileNotFoundError:
        pass
    path.unlink(missing_ok=True)
    return False


def _link_or_copy(plan: Path, path: Path) -> None:
    try:
        os.link(plan, path)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(plan, path)


def keep_timings(replaced: Path, partial: Path, folder: str) -> str:
    """Copy the replaced bundle's timing cache, if there is one, into the new bundle; returns the file's path there."""
    path = partial / folder / TIMING_CACHE
    if (replaced / folder / TIMING_CACHE).is_file():
        shutil.copyfile(replaced / folder / TIMING_CACHE, path)
    return str(path)
