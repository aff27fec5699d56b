"""Engines on ONNX Runtime: one thread pool and one arena for all, inputs and outputs bound to fixed addresses."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from skipdecode.cpu import usable_cores
from skipdecode.device import Call, Device
from skipdecode.errors import BundleError, CapacityError, SkipDecodeError, TargetError
from skipdecode.memory import Array
from skipdecode.text import is_utf8
from skipdecode.trace import Trace, traced

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_DISABLED_OPTIMIZERS = [
    # It turns adjacent slices (Phi-3's query, key, value) into an uneven Split. CUDA's Split copies its table of parts from a
    # host buffer at each run; a captured graph copies it from where that buffer was.
    "GatherSliceToSplitFusion",
    # It makes a bias an input of a product with quantised weights. CUDA adds the bias in another kernel all the same, and
    # CUTLASS's kernels (ORT_FPA_INTB_GEMM=1) do not take one.
    "MatMulNBitsFusion",
]
# Environment variables for CUDA's libraries, unless the user has set them (measured on an H200).
ENVIRONMENT = {
    # ONNX Runtime's XQA kernels clear a counter before each attention, and the host launches a graph that has nodes other than
    # kernels in 32 us instead of 5. With XQA a step takes 1.01x to 1.12x as long (1 to 32 rows on 128 to 1024 positions; also if
    # 4 heads share a key).
    "ORT_ENABLE_XQA": "0",
    # With a workspace cuBLAS splits a product of few rows and sums the parts in a second kernel; in a graph the workspace is also
    # an allocation. Without one a layer of OPT-6.7B takes 133 us instead of 141, with 8 rows 139 instead of 148.
    "CUBLAS_WORKSPACE_CONFIG": ":0:0",
    # Otherwise a mixture's kernels are timed when first run, each engine's in scratch memory that it keeps (four layers of 32
    # experts: 2654 MiB instead of 1884, the first prompt after 1.6 s instead of 0.3), and then sum in any order. A step is no
    # faster for it.
    "ORT_FORCE_DETERMINISTIC_MOE": "1",
    # If ORT_FPA_INTB_GEMM=1 lets CUTLASS multiply quantised weights, its best kernel for a number of rows is measured when that
    # number first comes, not for twelve numbers while loading (OPT-6.7B then loads in 1.7 s; without CUTLASS in 1.4).
    "ORT_FPA_INTB_PROFILE_M": "1",
}
# of a long reason: a node's name of any length, source file and function precede the reason itself
_FIRST_CHARS, _GAP, _LAST_CHARS = 100, "...", 297
# How ONNX Runtime's arena, C++, CUDA and cuBLAS say that memory ran out.
_NO_MEMORY = re.compile(r"Failed to allocate memory(?: for requested buffer of size (\d+))?|bad_alloc|out of memory|ALLOC_FAILED")

logger = logging.getLogger(__name__)

Tensor = tuple[str, tuple[int | None, ...]]  # dtype and shape, None for a size that differs from run to run
_DTYPES = {"tensor(float)": "float32", **{f"tensor({name})": name for name in ("float16", "bfloat16", "int32", "int64")}}

_pool_threads: int | None = None  # a process has one ONNX Runtime environment, with one pool and one arena; None: not yet made


def use_threads(threads: int | None) -> None:
    """Create the process's one thread pool and one arena, which all engines share.

    With one pool per engine a step takes 8x as long (120 ms against 16). With one arena per engine each keeps the peak of its
    longest prompt (25 engines of OPT-1.3B's shape on 400 tokens: 590 MiB more). The first call in a process decides the pool's
    size; ONNX Runtime cannot resize it.

    Args:
        threads: the pool's size; None: one for each core that this process may use.

    Raises:
        CapacityError: fewer than one thread, or more than the machine has cores.
        TargetError: something else in this process has made the pool first.
    """
    global _pool_threads
    cores = os.cpu_count() or 1
    if threads is not None and not 1 <= threads <= cores:
        raise CapacityError(f"{threads}: this machine has {cores} cores", f"choose 1..{cores}", where="--threads")
    if _pool_threads is not None:
        if threads not in (None, _pool_threads):
            logger.warning("threads=%s has no effect: this process's first load created a pool of %s", threads, _pool_threads)
    else:
        ort.set_default_logger_severity(3)
        pool_threads = threads or usable_cores()
        try:
            ort.set_global_thread_pool_sizes(pool_threads, 1)
        except Exception as error:  # somebody else has set its sizes
            raise _too_late_error() from error
        host = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(host, None)
        _pool_threads = pool_threads


class OrtEngine:
    """A compiled graph, ready to be bound.

    Args:
        trace: records what runs, and for how long.
        device: None: the CPU and numpy's arrays. Otherwise the graph is optimised for the device now, and a call only enqueues
            work on its stream.

    Raises:
        BundleError: the file cannot be loaded.
        TargetError: the device is missing, or cannot run the whole graph.
        CapacityError: it does not fit in memory.
    """

    def __init__(self, path: Path, trace: Trace | None = None, *, device: Device | None = None) -> None:
        options = ort.SessionOptions()
        options.use_per_session_threads = False
        options.log_severity_level = 4  # it would also print what it raises, in colours
        levels = ort.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_DISABLE_ALL if device is None else levels.ORT_ENABLE_ALL
        options.add_session_config_entry("session.use_env_allocators", "1")
        if device is not None and device.stream:
            # a node on the CPU would wait in each step, or be missing from its replay
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            # an arena doubles what it allocates at a time, so weights would take up to twice their size
            options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        if trace is not None:
            trace.profile(options)
        try:
            self.session = ort.InferenceSession(
                str(path), options, providers=[_provider(device)], disabled_optimizers=_DISABLED_OPTIMIZERS,
                enable_fallback=0,  # otherwise it prints what is wrong, and loads on the CPU
            )  # fmt: skip
        except Exception as error:  # ORT's exceptions have no common base but this
            raise _load_error(error, path) from error
        if trace is not None:
            trace.follow(self.session)
        self._path, self._trace, self._on_device = path, trace, device is not None
        # a trace times work that has ended, so each run waits
        self._run_options = None if device is None or trace is not None else _async_run_options()
        self.inputs, self.outputs = _tensors(self.session.get_inputs()), _tensors(self.session.get_outputs())

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Call:
        """As `Engine.bind`."""
        binding = self.session.io_binding()
        for name, array in inputs.items():
            if name in self.inputs:
                binding.bind_input(name, *_binding_arguments(array))
        for name, array in outputs.items():
            binding.bind_output(name, *_binding_arguments(array))
        session, options, on_device, path = self.session, self._run_options, self._on_device, self._path

        def run() -> None:
            try:
                session.run_with_iobinding(binding, options)
            except Exception as error:  # ORT's exceptions have no common base but this
                raise _run_error(error, path, on_device=on_device) from error

        return traced(self._trace, path.stem, run, kind="engine")


def _tensors(values: Sequence[Any]) -> dict[str, Tensor]:
    """The inputs or outputs that a graph declares, by name."""
    return {
        value.name: (_DTYPES.get(value.type, value.type), tuple(size if isinstance(size, int) else None for size in value.shape))
        for value in values
    }


def _too_late_error() -> TargetError:
    return TargetError(
        "something else in this process has made ONNX Runtime's shared thread pool first, so engines cannot have their own",
        "call skipdecode.load first",
    )


def _load_error(error: Exception, path: Path) -> SkipDecodeError:
    """The error for a session that cannot be created. ONNX Runtime gives the reason only as text."""
    message, where = str(error), str(path)
    if not is_utf8(path):
        return BundleError(
            "is not UTF-8, the only encoding that ONNX Runtime's Python package takes", "rename the folder", where=where
        )
    if "thread pool" in message:
        return _too_late_error()
    if _NO_MEMORY.search(message):
        return _memory_error(message, "free some, or export with --quantize int4", where)
    if "default CPU EP" in message:
        return TargetError(
            f"onnxruntime {ort.__version__} cannot run all of it with CUDA (it would leave nodes to the CPU)",
            "install a newer onnxruntime-gpu, or export the model for cpu", where=where,
        )  # fmt: skip
    if "CUDA" in message:
        return TargetError(
            f"ONNX Runtime cannot run it with CUDA ({_reason(message)})",
            "check nvidia-smi, and that cuBLAS and cuDNN of onnxruntime-gpu's CUDA are installed", where=where,
        )  # fmt: skip
    return BundleError(f"cannot be loaded ({_reason(message)})", "export the model again", where=where)


def _run_error(error: Exception, path: Path, *, on_device: bool) -> SkipDecodeError:
    """The error for a run that failed."""
    message = str(error)
    if _NO_MEMORY.search(message):
        return _memory_error(message, "send fewer rows or shorter prompts, or choose a smaller --prefill-chunk", "")
    remedy = "check nvidia-smi, and start again" if on_device else "check the bundle with skip-inspect --check-hashes"
    return TargetError(f"ONNX Runtime stopped ({_reason(message)})", remedy, where=str(path))


def _memory_error(message: str, remedy: str, where: str) -> CapacityError:
    sizes = [int(match[1]) for match in _NO_MEMORY.finditer(message) if match[1]]
    amount = f" for {-(-sizes[0] >> 20)} MiB" if sizes else ""
    return CapacityError(f"no memory is left{amount}", remedy, where=where)


def _reason(message: str) -> str:
    """The first line of ONNX Runtime's message; of a long one the start and the end, because the reason itself comes last."""
    line = message.partition("\n")[0].rstrip() or "no reason given"
    if len(line) <= _FIRST_CHARS + len(_GAP) + _LAST_CHARS:
        return line
    return line[:_FIRST_CHARS] + _GAP + line[-_LAST_CHARS:]


def _binding_arguments(array: Array) -> tuple[str, int, Any, list[int], int]:
    """What binding takes: device, its number, element type, shape and address."""
    if isinstance(array, np.ndarray):
        return "cpu", 0, array.dtype.type, list(array.shape), array.ctypes.data
    return array.device, 0, array.element_type, list(array.shape), array.pointer


def _async_run_options() -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def _provider(device: Device | None) -> tuple[str, dict[str, str]]:
    """The execution provider for `device`, and its options."""
    if device is None or not device.stream:
        return _CPU, {}
    return _CUDA, {"user_compute_stream": str(device.stream), "arena_extend_strategy": "kSameAsRequested"}


def prepare_cuda() -> None:
    """Refuse an ONNX Runtime built without CUDA, set `ENVIRONMENT`, and load the CUDA libraries that pip installed.

    Raises:
        TargetError: ONNX Runtime has no CUDA; the message says what to install.
    """
    if _CUDA not in ort.get_available_providers():
        raise TargetError(
            f"the installed onnxruntime {ort.__version__} is built without CUDA",
            "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu", where="--target",
        )  # fmt: skip
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # it prints what it fails to find, which the system may have
        ort.preload_dlls()
    if printed.getvalue():
        logger.info("%s", printed.getvalue().strip())


def check_library(version: str, bundle: Path) -> None:
    """Refuse engines compiled by another version of ONNX Runtime: prepacked weights work only with the version that wrote them.

    Raises:
        TargetError: the installed version differs.
    """
    if ort.__version__ != version:
        raise TargetError(
            f"the engines were compiled by onnxruntime {version}, but {ort.__version__} is installed",
            f"install onnxruntime=={version} or export the model again", where=str(bundle),
        )  # fmt: skip
