"""What an export is asked for, and what it decides by that before it writes anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from skipdecode import manifest
from skipdecode.errors import BundleError, TargetError
from skipdecode.exporter.graphs import Skeleton
from skipdecode.exporter.model_names import is_utf8
from skipdecode.exporter.targets import TargetRequest
from skipdecode.graph_passes.compile_tensorrt import BuilderOptions
from skipdecode.graph_passes.plan import Plan
from skipdecode.graph_passes.quantize_weights import BLOCK_SIZES, METHODS, Quantization
from skipdecode.schedule import Schedule
from skipdecode.schedule_builders import ScheduleRequest

_MOST_ROWS = 2**31 - 1  # dimensions of TensorRT's tensors are of 32 bits
_MOST_MIB = 2**43 - 1  # whose bytes are a number of 63 bits
DEFAULT_METHOD, DEFAULT_BLOCK = "rtn", 32
QUANTIZED_BITS = {"none": None, "int8": 8, "int4": 4}  # --quantize -> bits a weight


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export, and where to."""

    model: str  # local folder, hub id, or opt-SIZE
    out: Path
    schedule: ScheduleRequest = field(default_factory=ScheduleRequest)
    max_batch: int = 16  # rows
    max_length: int | None = None  # tokens of a row; None: what the model has, at most 2048
    targets: tuple[str, ...] = ("cpu",)  # as --target takes them: tensorrt-rtx:sm89
    dtype: str = "auto"  # auto, fp32, fp16, bf16
    quantize: str = "none"  # none, int8, int4: weight-only
    quantize_method: str = DEFAULT_METHOD  # rtn, k-quant
    quantize_block: int = DEFAULT_BLOCK  # inputs that share one scale: 32, 64, 128
    builder: BuilderOptions = field(default_factory=BuilderOptions)  # of TensorRT's targets
    random_weights: bool = False
    segment_bytes: int | None = None  # most compiled weights of a segment; None: what suits the targets
    slim: bool = False  # leave out what the targets do not read
    force: bool = False  # replace `out`


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
