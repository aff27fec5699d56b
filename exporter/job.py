"""What an export decides by what it is asked for, before it writes anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skipdecode import manifest
from skipdecode.errors import BundleError, TargetError
from skipdecode.exporter.graphs import Skeleton
from skipdecode.exporter.model_names import is_utf8
from skipdecode.exporter.request import DEFAULT_BLOCK, DEFAULT_METHOD, QUANTIZED_BITS, ExportRequest
from skipdecode.exporter.targets import TargetRequest
from skipdecode.graph_passes.plan import Plan
from skipdecode.graph_passes.quantize_weights import BLOCK_SIZES, METHODS, Quantization
from skipdecode.schedule import Schedule

_MOST_ROWS = 2**31 - 1  # dimensions of TensorRT's tensors are of 32 bits
_MOST_MIB = 2**43 - 1  # whose bytes are a number of 63 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request, and what follows from it and the model."""

    request: ExportRequest
    targets: tuple[TargetRequest, ...]
    checkpoint: Path | None  # None: the model's configuration is all that there is
    skeleton: Skeleton
    limits: manifest.Limits
    schedule: Schedule
    plan: Plan
    quantization: Quantization | None  # None: weights stay as wide as they are


def check_options(request: ExportRequest) -> None:
    """Refuse what is wrong whatever the model is.

    Raises:
        BundleError: `out` has a name that libraries do not take.
        TargetError: an option is out of its range.
    """
    if not is_utf8(request.out):
        raise BundleError(
            "is not UTF-8, the only encoding that tokenizers and ONNX Runtime take",
            "choose another --out",
            where=str(request.out),
        )
    _check_quantization(request)
    workspace, level = request.builder.workspace_mib, request.builder.optimization_level
    if workspace is not None and not 1 <= workspace <= _MOST_MIB:
        raise TargetError(f"{workspace} MiB is out of range", f"choose 1..{_MOST_MIB}, or leave it out", where="--workspace")
    if level is not None and not 0 <= level <= 5:
        raise TargetError(f"{level} is unknown", "choose 0 (builds fastest) to 5 (runs fastest)", where="--optimization-level")
    if not 1 <= request.max_batch <= _MOST_ROWS:
        raise TargetError(f"{request.max_batch} is out of range", f"choose 1..{_MOST_ROWS}", where="--max-batch")


def _check_quantization(request: ExportRequest) -> None:
    if request.quantize not in QUANTIZED_BITS:
        raise TargetError(f"{request.quantize!r} is unknown", f"choose one of {', '.join(QUANTIZED_BITS)}", where="--quantize")
    if request.quantize_method not in METHODS:
        choices = f"choose one of {', '.join(METHODS)}"
        raise TargetError(f"{request.quantize_method!r} is unknown", choices, where="--quantize-method")
    if request.quantize_block not in BLOCK_SIZES:
        choices = f"choose one of {', '.join(map(str, BLOCK_SIZES))}"
        raise TargetError(f"{request.quantize_block} is unknown", choices, where="--quantize-block")
    if request.quantize == "none" and (request.quantize_method, request.quantize_block) != (DEFAULT_METHOD, DEFAULT_BLOCK):
        where = "--quantize-method" if request.quantize_method != DEFAULT_METHOD else "--quantize-block"
        raise TargetError("no weight is quantised", "add --quantize int8 or int4, or leave it out", where=where)
