"""Compile a lowered graph to a TensorRT plan with the real parser and builder, and check what they report.

TensorRT-RTX builds without a GPU. Anything that could silently give wrong results is an error here: an input that the parser
ignored, a KV update that is not in place. (An attention without a fused kernel fails to build: the parser marks it as not
decomposable.)

A builder takes 3x its engine's weights in memory and releases little of that, so each one runs in a process of its own:
`python -m skipdecode.graph_passes.compile_tensorrt`, with a `PlanRequest` as JSON on standard input. polygraphy configures and
runs the builder and keeps the timing cache.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipdecode.bindings import PAST_KEY, PAST_VALUE
from skipdecode.child_process import command_of, end_with
from skipdecode.engines import tensorrt, tensorrt_library
from skipdecode.errors import TargetError, shortened

Range = tuple[int, int, int]  # least, most likely, most
_REFUSED, _NOT_WRITTEN = 2, 3  # exit statuses of a builder process; its last line is the TargetError, or the OSError's errno
_USE_CUDA_INSTEAD = "export for cuda, which needs no builder"
_STANDSTILL_S = 120  # without any CPU time, after which a builder is considered deadlocked
_POLL_S = 0.2  # between two looks at a builder
_MIN_VERSIONS = {"tensorrt-rtx": "1.7", "tensorrt": "10.15"}  # versions with a layer that updates a KV buffer in place


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Sizes that the builder optimises for; an execution context picks one profile."""

    batch: Range  # B
    tokens: Range  # S


@dataclass(frozen=True, slots=True, kw_only=True)
class BuilderOptions:
    """What the builder may spend; None: its own default."""

    workspace_mib: int | None = None  # of GPU memory that a kernel may use while it runs
    optimization_level: int | None = None  # 0 (builds fastest) .. 5 (runs fastest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """One graph to compile."""

    target: str  # tensorrt-rtx, tensorrt
    source: str  # lowered ONNX file, weights by reference
    plan: str  # file to write
    profiles: tuple[Profile, ...]
    capabilities: tuple[str, ...] = ()  # sm89, ...; none: Ampere and later (tensorrt-rtx), the GPU at hand (tensorrt)
    options: BuilderOptions = BuilderOptions()
    timing_cache: str | None = None  # file of kernel timings, read and added to so that no kernel is timed twice


def library(target: str) -> Any:
    """The Python package of a TensorRT target, to build with.

    Raises:
        TargetError: the package or polygraphy is not installed, or the package is too old.
    """
    module = tensorrt_library.library(target)
    if not hasattr(module.LayerType, "KV_CACHE_UPDATE"):
        remedy = f"pip install '{target}>={_MIN_VERSIONS[target]}'"
        raise TargetError(f"{target} {module.__version__} is too old", remedy, where="--target")
    if importlib.util.find_spec("polygraphy") is None:  # not imported yet: see `tensorrt_library.polygraphy`
        raise tensorrt_library.missing_package_error(target, "polygraphy")
    return module


def build_plan(request: PlanRequest) -> None:
    """Parse, build and write `request.plan`.

    Raises:
        TargetError: the parser or the builder refused the graph, or accepted it in a way that gives wrong results.
    """
    trt = library(request.target)
    log = tensorrt.make_log(trt, warnings=True)
    where = Path(request.plan).name
    builder = _create_builder(trt, log, request.target)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(request.source):
        raise TargetError(
            f"{request.target}'s parser refused it: {shortened(parser.get_error(0).desc(), 300)}", _USE_CUDA_INSTEAD, where=where
        )
    _check_network(network, trt, where)
    polygraphy, exceptions = (tensorrt_library.polygraphy(request.target, name) for name in ("backend.trt", "exception"))
    config = _create_config(trt, polygraphy, builder, network, request)
    try:
        plan = polygraphy.engine_bytes_from_network((builder, network, parser), config, save_timing_cache=request.timing_cache)
    except exceptions.PolygraphyException as error:
        reason = log.first_error()
        raise TargetError(f"{request.target} could not build it ({reason})", _remedy(reason), where=where) from error
    ignored = [message for message in log.warnings if "unused input" in message.lower()]
    if ignored:
        raise TargetError(f"{request.target} ignored an input ({shortened(ignored[0], 300)})", _USE_CUDA_INSTEAD, where=where)
    Path(request.plan).write_bytes(plan)


def _remedy(reason: str) -> str:
    """What to do about a builder's error."""
    if "workspace" in reason:
        return "choose a larger --workspace"
    if "SM75" in reason:  # it multiplies no matrices in fp32, which linear attention and some routers do
        return "leave sm75 out of --target"
    return "free some memory" if tensorrt.NO_MEMORY.search(reason) else _USE_CUDA_INSTEAD


def check_gpu(target: str) -> None:
    """Refuse a library that needs a GPU to build on if there is none.

    Raises:
        TargetError: there is no GPU, or the library is not installed.
    """
    trt = library(target)
    _create_builder(trt, tensorrt.make_log(trt), target)


def _create_builder(trt: Any, log: Any, target: str) -> Any:
    try:
        return trt.Builder(log)
    except TypeError as error:  # raised by the bindings for a null pointer
        raise TargetError(f"{target} found no GPU to build on", "build with --target tensorrt-rtx:smNN") from error


def build_in_process(request: PlanRequest, stop: threading.Event) -> None:
    """Run `build_plan` in a process of its own.

    Args:
        stop: kills the process once set.

    Raises:
        TargetError: as `build_plan`, and where the process was killed or stood still.
        OSError: the plan could not be written.
    """
    command = command_of("skipdecode.graph_passes.compile_tensorrt")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    error_output, stood_still = _wait_for(process, json.dumps({**dataclasses.asdict(request), "parent": os.getpid()}), stop)
    if process.returncode == 0:
        return
    line = (error_output.strip().splitlines() or ["no output"])[-1]
    if process.returncode == _REFUSED:
        raise TargetError(line)  # already complete: what, where, what to do
    if process.returncode == _NOT_WRITTEN:
        raise OSError(int(line), os.strerror(int(line)), request.plan)
    reason, remedy = f"failed ({shortened(line, 300)})", _USE_CUDA_INSTEAD
    if stood_still:  # TensorRT-RTX 1.7.1's threads wait for one another after one of them ran out of memory
        reason, remedy = f"made no progress for {_STANDSTILL_S} s, probably for lack of memory", "free some"
    elif process.returncode == -signal.SIGKILL:
        reason, remedy = "was killed, probably for lack of memory", "free some"
    elif process.returncode < 0:
        reason = f"ended by signal {-process.returncode}"
    raise TargetError(f"the {request.target} builder {reason}", remedy, where=Path(request.plan).name)


def _wait_for(process: subprocess.Popen[str], stdin: str | None, stop: threading.Event) -> tuple[str, bool]:
    """Wait for a process; its standard error, and whether it was killed because it stood still.

    Time is counted in looks, not by a clock: after Ctrl-Z, or a container's pause, both processes go on where they were.
    """
    cpu_ticks, idle_looks, stood_still = 0, 0, False
    while True:
        try:
            return process.communicate(stdin, timeout=_POLL_S)[1], stood_still
        except subprocess.TimeoutExpired:
            stdin = None  # `communicate` takes input in its first call only
        last_cpu_ticks, cpu_ticks = cpu_ticks, _processor_time(process.pid)
        idle_looks = idle_looks + 1 if cpu_ticks == last_cpu_ticks else 0
        stood_still = idle_looks * _POLL_S > _STANDSTILL_S
        if stood_still or stop.is_set():
            process.kill()


def _processor_time(pid: int) -> int:
    """CPU ticks of all threads of a child that has not been waited for yet."""
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(after_name[11]) + int(after_name[12])


def _check_network(network: Any, trt: Any, where: str) -> None:
    """Require that every KV input is updated in place: read by a KV_CACHE_UPDATE layer whose output is a network output."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    updates = [layer for layer in layers if layer.type == trt.LayerType.KV_CACHE_UPDATE]
    in_place = {u.get_input(0).name for u in updates if u.get_input(0).is_network_input and u.get_output(0).is_network_output}
    names = [network.get_input(index).name for index in range(network.num_inputs)]
    not_in_place = [name for name in names if name.startswith((PAST_KEY, PAST_VALUE)) and name not in in_place]
    if not_in_place:
        raise TargetError(f"the KV update of {not_in_place[0]} is not in place", _USE_CUDA_INSTEAD, where=where)


def _create_config(trt: Any, polygraphy: Any, builder: Any, network: Any, request: PlanRequest) -> Any:
    profiles = []
    for profile in request.profiles:
        shapes = polygraphy.Profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            ranges = (profile.batch, profile.tokens)
            sizes = [ranges[axis] if size == -1 else (size,) * 3 for axis, size in enumerate(tensor.shape)]
            shapes.add(tensor.name, *(tuple(size[bound] for size in sizes) for bound in range(3)))
        profiles.append(shapes)
    workspace = request.options.workspace_mib
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # polygraphy always sets a timing cache, unused by TensorRT-RTX
        config = polygraphy.create_config(
            builder, network, profiles=profiles, load_timing_cache=request.timing_cache,
            memory_pool_limits=None if workspace is None else {trt.MemoryPoolType.WORKSPACE: workspace << 20},
            builder_optimization_level=request.options.optimization_level, profiling_verbosity=trt.ProfilingVerbosity.DETAILED,
            tf32=False,  # what a plan computes in fp32, such as sums over many tokens, needs all bits of fp32
        )  # fmt: skip
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        # without it TensorRT-RTX may allocate while it runs, which a CUDA graph cannot capture
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    config.max_aux_streams = 0  # a step has no parallel work, and the CUDA graph that captures it records one stream
    if request.capabilities:
        config.num_compute_capabilities = len(request.capabilities)
        for index, name in enumerate(request.capabilities):
            config.set_compute_capability(getattr(trt.ComputeCapability, name.upper()), index)
    return config


def _main() -> int:
    fields = json.load(sys.stdin)
    end_with(fields.pop("parent"))
    profiles = tuple(Profile(batch=tuple(each["batch"]), tokens=tuple(each["tokens"])) for each in fields.pop("profiles"))
    options = BuilderOptions(**fields.pop("options"))
    try:
        build_plan(PlanRequest(**{**fields, "profiles": profiles, "options": options}))
    except TargetError as error:
        print(error, file=sys.stderr)
        return _REFUSED
    except OSError as error:
        print(error.errno, file=sys.stderr)
        return _NOT_WRITTEN
    return 0


if __name__ == "__main__":
    sys.exit(_main())
