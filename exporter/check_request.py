"""Checks of a request that do not depend on the model, made without torch and transformers, which take seconds to import."""

from __future__ import annotations

from pathlib import Path

from skipdecode.errors import BundleError, TargetError
from skipdecode.exporter.checkpoint_folder import checkpoint_folder
from skipdecode.exporter.output_folder import check_out, check_outside, real_out
from skipdecode.exporter.request import DEFAULT_BLOCK, DEFAULT_METHOD, QUANTIZED_BITS, ExportRequest
from skipdecode.exporter.targets import TargetRequest, check_dtype, parse_targets
from skipdecode.graph_passes.quantization import BLOCK_SIZES, METHODS
from skipdecode.schedule_builders import check_schedule_request
from skipdecode.text import is_utf8

_MAX_ROWS = 2**31 - 1  # TensorRT's dimensions are signed 32-bit integers
_MAX_LENGTH = 2**24  # beyond any model's; engines hold tables with a row for each position
_MAX_MIB = 2**43 - 1  # the same in bytes fits a signed 64-bit integer


def check_request(request: ExportRequest) -> tuple[TargetRequest, ...]:
    """Refuse what can be refused before the model's configuration is read.

    Returns:
        The request's targets.

    Raises:
        BundleError: `out` has a name that libraries do not take, may not be replaced, or holds the checkpoint or the table.
        ScheduleError: the schedule is unknown, its table is missing, or one of its numbers is out of range.
        TargetError: an option is out of range, a target is unknown, or a target's package is missing.
        ModelNotSupportedError: `model` is neither a hub id, an OPT size nor a folder with a readable config.json.
    """
    if not is_utf8(request.out):
        raise BundleError(
            "is not UTF-8, the only encoding that tokenizers and ONNX Runtime's Python package take",
            "choose another --out",
            where=str(request.out),
        )
    check_schedule_request(request.schedule)
    _check_quantization(request)
    workspace, level = request.builder.workspace_mib, request.builder.optimization_level
    if workspace is not None and not 1 <= workspace <= _MAX_MIB:
        raise TargetError(f"{workspace} MiB is out of range", f"choose 1..{_MAX_MIB}, or leave it out", where="--workspace")
    if level is not None and not 0 <= level <= 5:
        raise TargetError(f"{level} is unknown", "choose 0 (builds fastest) to 5 (runs fastest)", where="--optimization-level")
    if not 1 <= request.max_batch <= _MAX_ROWS:
        raise TargetError(f"{request.max_batch} is out of range", f"choose 1..{_MAX_ROWS}", where="--max-batch")
    if request.max_length is not None and request.max_length < 2:
        raise TargetError(f"{request.max_length} leaves no token to generate", "choose 2 or more", where="--max-length")
    if request.max_length is not None and request.max_length > _MAX_LENGTH:
        raise TargetError(f"{request.max_length} is longer than any row", f"choose {_MAX_LENGTH} or less", where="--max-length")
    out, table = real_out(request.out), request.schedule.name.partition(":")[2]
    check_out(out, request.force)
    if table:
        check_outside(out, Path(table), "the table")
    targets = parse_targets(request.targets)
    check_dtype(request.dtype, targets)
    checkpoint = checkpoint_folder(request.model)
    if checkpoint is not None:
        check_outside(out, checkpoint, "the checkpoint")
    return targets


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
        raise TargetError("has no effect without --quantize", "add --quantize int8 or int4, or leave it out", where=where)
