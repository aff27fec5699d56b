"""What an export is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from skipdecode.graph_passes.compile_tensorrt import BuilderOptions
from skipdecode.schedule_builders import ScheduleRequest

DEFAULT_MAX_LENGTH = 2048
DEFAULT_METHOD, DEFAULT_BLOCK = "rtn", 32
QUANTIZED_BITS = {"none": None, "int8": 8, "int4": 4}  # --quantize -> bits a weight


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export, and where to."""

    model: str  # local folder, hub id, or opt-SIZE
    out: Path
    schedule: ScheduleRequest = field(default_factory=ScheduleRequest)
    max_batch: int = 16  # rows
    max_length: int | None = None  # tokens of a row; None: the model's maximum, at most DEFAULT_MAX_LENGTH
    targets: tuple[str, ...] = ("cpu",)  # as --target takes them: tensorrt-rtx:sm89
    dtype: str = "auto"  # auto, fp32, fp16, bf16
    quantize: str = "none"  # none, int8, int4: weight-only
    quantize_method: str = DEFAULT_METHOD  # rtn, k-quant
    quantize_block: int = DEFAULT_BLOCK  # inputs that share one scale: 32, 64, 128
    builder: BuilderOptions = field(default_factory=BuilderOptions)  # for TensorRT's targets
    random_weights: bool = False
    segment_bytes: int | None = None  # most compiled weights per segment; None: chosen to suit the targets
    slim: bool = False  # leave out what the targets do not read
    force: bool = False  # replace `out`
