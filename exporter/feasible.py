"""Checks whether a request can be met (what targets take, what fits on the disk), and chooses the size of segments."""

from __future__ import annotations

import bisect
import shutil
from collections.abc import Sequence
from typing import Any

import torch

from skipdecode import manifest
from skipdecode.cuda_driver import Gpu, gpu_at_hand
from skipdecode.errors import BundleError, ModelNotSupportedError, TargetError
from skipdecode.exporter.architectures import EXPERTS_GELU, positions_setting
from skipdecode.exporter.config_json import config_origin
from skipdecode.exporter.request import DEFAULT_MAX_LENGTH, QUANTIZED_BITS, ExportRequest
from skipdecode.exporter.skeleton import Skeleton
from skipdecode.exporter.targets import TargetRequest
from skipdecode.exporter.tensorrt_target import HALF_BYTES, check_tensorrt, slots_of_plans
from skipdecode.graph_passes.compile_ort import check_packs_quantised
from skipdecode.graph_passes.compile_tensorrt import BuilderOptions, check_gpu
from skipdecode.graph_passes.quantization import BLOCK_SIZES
from skipdecode.kv_buffer import MIN_SLOTS, fixed_slots, slots_per_layer, state_bytes
from skipdecode.model import layer_group
from skipdecode.schedule import Schedule

# Most bytes of a segment's compiled weights. A CPU reads 256 MiB in about 7 ms and takes at most 0.1 ms to go on to the next
# segment; larger segments would take more memory at export and while plans are built. A GPU reads 256 MiB in 0.06 ms, so the 9 us
# that a border between segments costs it (a sum and a norm are not fused there) would weigh far more. Its segments are larger.
SEGMENT_BYTES, CUDA_SEGMENT_BYTES = 256 << 20, 2 << 30
_EXPERTS_SUFFIX = "experts.down_proj"  # end of the name of experts' matrices in transformers


def choose_max_length(request: ExportRequest, config: Any) -> int:
    """The most tokens of a row: as requested, else the model's positions up to DEFAULT_MAX_LENGTH.

    Raises:
        ModelNotSupportedError: the model has one position, so nothing could be generated.
    """
    if request.max_length is not None:
        return request.max_length
    name = positions_setting(config)
    longest = getattr(config, name, None)
    if longest == 1:
        raise ModelNotSupportedError(f"{name} is 1, which leaves no token to generate", "correct it", where=config_origin(config))
    return min(DEFAULT_MAX_LENGTH, longest) if isinstance(longest, int) and longest > 0 else DEFAULT_MAX_LENGTH


def max_layers_per_segment(request: ExportRequest, targets: Sequence[TargetRequest], skeleton: Skeleton) -> int:
    """The most layers of a segment; all targets share one division into segments."""
    layer_bytes = int(max(skeleton.layer_parameters) * _compiled_itemsize(request, skeleton))
    return max(1, _segment_bytes(request, targets) // layer_bytes)


def check_feasible(
    request: ExportRequest, targets: Sequence[TargetRequest], skeleton: Skeleton, limits: manifest.Limits, schedule: Schedule
) -> None:
    """Refuse, before anything is written, what could not be compiled or stored.

    Raises:
        TargetError: a target does not take the model with these options.
        BundleError: the disk is too full.
    """
    if any(parameter.endswith(_EXPERTS_SUFFIX) for parameter in skeleton.shapes):
        _check_mixture(request, targets, skeleton)
    _check_builder(request, targets, skeleton, limits, schedule)
    if request.quantize != "none":
        _check_quantized(request, targets, skeleton)
    _check_disk(request, targets, skeleton)


def _check_builder(
    request: ExportRequest, targets: Sequence[TargetRequest], skeleton: Skeleton, limits: manifest.Limits, schedule: Schedule
) -> None:
    if not any(target.is_tensorrt for target in targets):
        if request.builder != BuilderOptions():
            raise TargetError(
                "--workspace and --optimization-level are for TensorRT's builder", "add --target tensorrt-rtx, or leave them out"
            )
        return
    check_tensorrt(skeleton, limits, schedule)
    for target in targets:
        if target.name == "tensorrt":
            check_gpu(target.name)
            _check_memory(request, skeleton, limits, schedule, gpu_at_hand())
        if "sm75" in target.capabilities:
            _check_turing(request, skeleton)


def _check_memory(request: ExportRequest, skeleton: Skeleton, limits: manifest.Limits, schedule: Schedule, gpu: Gpu) -> None:
    """Refuse a row length at which the weights and one row's KV buffer exceed the GPU's memory; plans are built for this GPU."""

    def row_bytes(length: int) -> int:
        slots = fixed_slots(slots_per_layer(schedule, 1, length - 1), slots_of_plans(skeleton, schedule, length))
        layers = (layer_group(skeleton.state_layers, skeleton.keys, layer) for layer in range(len(slots)))
        return sum(state_bytes(layer, count, HALF_BYTES) for layer, count in zip(layers, slots, strict=True) if count)

    weights, row = int(_compiled_itemsize(request, skeleton) * skeleton.num_parameters), row_bytes(limits.max_length)
    available = gpu.memory_bytes - weights
    if row <= available:
        return
    blocks_that_fit = bisect.bisect_right(range(MIN_SLOTS, limits.max_length, MIN_SLOTS), available, key=row_bytes)
    larger = "choose a larger GPU" if request.quantize == "int4" else "choose --quantize int4, or a larger GPU"
    raise TargetError(
        f"a row of {limits.max_length} tokens takes {row >> 20} MiB on top of {weights >> 20} MiB of weights,"
        f" but the GPU ({gpu.name}) has {gpu.memory_bytes >> 20} MiB",
        f"choose {blocks_that_fit * MIN_SLOTS} or less" if blocks_that_fit else larger, where="--max-length",
    )  # fmt: skip


def _check_turing(request: ExportRequest, skeleton: Skeleton) -> None:
    """Refuse what TensorRT-RTX compiles for every GPU but the oldest, sm75."""
    if skeleton.dtype == torch.bfloat16:
        raise TargetError("sm75 has no bf16", "leave sm75 out, or choose --dtype fp16", where="--target")
    if request.quantize == "int4":
        raise TargetError("plans for sm75 have no int4", "leave sm75 out, or choose --quantize int8", where="--target")


def _check_mixture(request: ExportRequest, targets: Sequence[TargetRequest], skeleton: Skeleton) -> None:
    """Refuse mixtures that ONNX Runtime's CUDA kernels do not take."""
    if not any(target.name == "cuda" for target in targets):
        return
    if skeleton.config.model_type == "gemma4_text":
        raise TargetError(
            f"the experts use {EXPERTS_GELU}, but cuda supports only silu", "choose cpu or tensorrt-rtx", where="--target"
        )
    multiple = 8 if request.quantize == "none" else 64  # 128 bits of a row; a tile of the weights that are packed on loading
    for width, what in _input_widths(skeleton).items():
        if width % multiple:
            remedy = "choose cpu" if width % 8 else "leave out --quantize, or choose cpu"
            raise TargetError(f"the {what} {width} is not a multiple of {multiple}, as cuda requires", remedy, where="--target")


def _input_widths(skeleton: Skeleton) -> dict[int, str]:
    """Width -> description, for the inputs of nearly all matrices."""
    hidden = skeleton.config.hidden_size
    matrices = (shape for name, shape in skeleton.shapes.items() if name.endswith(_EXPERTS_SUFFIX))
    experts = {size for shape in matrices for size in shape[1:]}  # [E,H,I] or transposed; H may be a projected width
    return dict.fromkeys(experts, "width of the experts") | {hidden: "hidden size"}


def _check_quantized(request: ExportRequest, targets: Sequence[TargetRequest], skeleton: Skeleton) -> None:
    if any(target.name == "cpu" for target in targets):
        check_packs_quantised()
    plans = [target for target in targets if target.is_tensorrt]
    in_blocks = request.quantize == "int4" or len(plans) < len(targets)
    if plans and request.quantize == "int8":  # one scale per output
        if request.quantize_method != "rtn":
            message = f"{request.quantize_method} has zero points, which {plans[0].name} does not support in int8"
            raise TargetError(message, "choose rtn, or --quantize int4", where="--quantize-method")
        if not in_blocks and request.quantize_block != BLOCK_SIZES[0]:
            message = f"in int8 {plans[0].name} has one scale per output, not blocks"
            raise TargetError(message, "leave it out, or choose --quantize int4", where="--quantize-block")
    if in_blocks:
        _check_block(request.quantize_block, skeleton)


def _check_block(block: int, skeleton: Skeleton) -> None:
    """Refuse blocks that do not divide the main widths; matrices of other widths may stay unquantised where blocks do not fit."""
    for width, what in _input_widths(skeleton).items():
        if width % block:
            raise TargetError(
                f"the {what} {width} is not a multiple of {block}, so the weights would stay as they are",
                "choose a smaller one" if block > BLOCK_SIZES[0] else "leave out --quantize",
                where="--quantize-block",
            )


def _check_disk(request: ExportRequest, targets: Sequence[TargetRequest], skeleton: Skeleton) -> None:
    """Refuse a disk without room for the bundle and a temporary copy of its largest segment.

    A bundle holds the weights once as source and once per target, quantised or not; for cpu both plain and packed.
    """
    out, itemsize = request.out, _compiled_itemsize(request, skeleton)
    parent = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    fp32 = request.quantize == "none"
    cpu_itemsize = 2 * 4 if fp32 else 2.2 * itemsize  # a quantised block's packed form also holds the sum of its levels
    compiled = sum(cpu_itemsize if target.name == "cpu" else itemsize for target in targets)
    layer = max(skeleton.layer_parameters) * itemsize
    segment = min(max(_segment_bytes(request, targets), layer), itemsize * skeleton.num_parameters)
    # an embedding on a GPU stays unquantised; where it is tied, the quantised head is a copy
    outside_layers = (skeleton.num_parameters - sum(skeleton.layer_parameters)) * skeleton.dtype.itemsize
    unquantised = 0 if fp32 else outside_layers * sum(target.name != "cpu" for target in targets)
    needed = int((skeleton.dtype.itemsize + compiled) * skeleton.num_parameters + unquantised + segment)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise BundleError(
            f"{free >> 20} MiB are free, but the bundle needs {needed >> 20} MiB",
            "free some or choose another --out",
            where=str(out),
        )


def _segment_bytes(request: ExportRequest, targets: Sequence[TargetRequest]) -> int:
    default = CUDA_SEGMENT_BYTES if all(target.name == "cuda" for target in targets) else SEGMENT_BYTES
    return request.segment_bytes or default


def _compiled_itemsize(request: ExportRequest, skeleton: Skeleton) -> float:
    """Bytes of a weight in engines; those of a quantised weight include its share of scales."""
    bits = QUANTIZED_BITS[request.quantize]
    return skeleton.dtype.itemsize if bits is None else (bits + 1) / 8
