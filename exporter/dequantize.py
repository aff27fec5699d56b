"""Dequantises a checkpoint's matrices one at a time, as they are read, to fp32 or to a dtype that is just as exact.

    fp8                 DeepSeek, MiniMax, Qwen: `weight` in FP8, `weight_scale_inv` with a factor per block
    mxfp4               gpt-oss' experts: `_blocks` of two numbers a byte, `_scales`; dequantised by transformers itself
    compressed-tensors  llm-compressor: `weight` in int8 or FP8, or `weight_packed`; `weight_scale`, `weight_zero_point`
    modelopt            NVIDIA: `weight` in FP8, or in FP4 as bytes; `weight_scale`, and for FP4 `weight_scale_2`
    gptq, awq           `qweight`, `qzeros`, `scales`; GPTQ may have `g_idx`, the group of each input
    bitnet              `weight`, four numbers a byte, each -1, 0 or 1, and one `weight_scale`
    bitsandbytes        `weight`; in 4 bits also what `bitsandbytes_weights` reads, in 8 bits `SCB`

Engines compute with the result as with any other weights: of schemes that also round activations (W8A8), only the weights count.
Scales are multiplied in fp32, whatever their stored dtype, so that numbers stay on levels that `--quantize` can keep.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.bitsandbytes_weights import STATE_NAMES, dequantise_4_bit
from skipdecode.exporter.quantization_config import block_structure, layouts, quantization_config

Read = Callable[[], torch.Tensor]
Tensors = dict[str, torch.Tensor]  # of one matrix, by the ends of their names
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP4 = torch.tensor([sign * size for sign in (1, -1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])  # E2M1, indexed by the bits
_PACKED_BITS = (2, 4, 8)  # widths of which a byte holds a whole number
_CHUNK_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How a file holds a quantised matrix: in tensors whose names share a stem and differ in their ends."""

    levels: str  # end of the name of the quantised numbers
    scales: str  # .. of their scales; without these a matrix is not quantised
    optional: tuple[str, ...] = ()  # .. of optional tensors
    result: str = ""  # .. of the dequantised matrix
    dequantise: Callable[[Tensors, Any], torch.Tensor]  # (tensors, the model's configuration) -> the dequantised matrix


def dequantise_lazily(stored: Mapping[str, Read], config: Any) -> dict[str, Read]:
    """The stored tensors, with quantised matrices replaced by dequantised ones under the model's names; read on demand.

    Raises:
        ModelNotSupportedError: on reading, where tensors do not fit together.
    """
    readers = dict(stored)
    for form in _FORMS.get(quantization_config(config).get("quant_method"), ()):
        for name in [name for name in stored if name.endswith(form.levels)]:
            stem = name.removesuffix(form.levels)
            if stem + form.scales not in stored:
                continue
            ends = [end for end in (form.levels, form.scales, *form.optional) if stem + end in stored]
            parts = {end: readers.pop(stem + end) for end in ends}
            readers[stem + form.result] = partial(_read_dequantised, stem + form.result, form, parts, config)
    return readers


def _read_dequantised(name: str, form: _Form, parts: Mapping[str, Read], config: Any) -> torch.Tensor:
    tensors = {end: read() for end, read in parts.items()}
    description = " and ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors.values())
    try:
        return form.dequantise(tensors, config)
    except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError) as error:  # ours first, then torch's and JSON's
        why = f"{description}{f': {error}' if isinstance(error, ValueError) and str(error) else ''}"
        raise ModelNotSupportedError(f"{name} cannot be put together ({why})", "give an unquantised checkpoint") from error


def _block_fp8(tensors: Tensors, config: Any) -> torch.Tensor:
    return _scale_blocks(tensors[""], tensors["_scale_inv"], quantization_config(config).get("weight_block_size"), _FP8_DTYPES)


def _scale_blocks(
    matrix: torch.Tensor, scales: torch.Tensor, block: Sequence[int] | None, dtypes: Container[torch.dtype]
) -> torch.Tensor:
    """Multiply a matrix [..,N,K] by factors [..,ceil(N/n),ceil(K/k)] of blocks [n,k]; `block` None: by one factor for all.

    transformers' FP8 dequantiser divides the matrix evenly into as many blocks as there are factors, which is wrong where the
    last block is smaller.
    """
    *leading, rows, columns = matrix.shape if matrix.ndim > 1 else (0, 0)
    height, width = block or (rows, columns)
    blocks = torch.Size((*leading, -(-rows // height), -(-columns // width))) if rows and columns else torch.Size((0,))
    if matrix.dtype not in dtypes or not scales.is_floating_point() or scales.numel() != blocks.numel():
        raise ValueError(f"with blocks of {height} x {width}")
    factors = scales.float().reshape(blocks).repeat_interleave(height, dim=-2)[..., :rows, :]
    weight = matrix.float()
    for start in range(0, columns, width):  # a factor per number would take a second matrix
        weight[..., start : start + width] *= factors[..., start // width, None]
    return weight


def _mxfp4(tensors: Tensors, config: Any) -> torch.Tensor:
    """Blocks [E,N,K/32,16] of two numbers a byte and exponents [E,N,K/32], both uint8 -> [E,K,N] in bf16, which is exact."""
    blocks, scales = tensors["_blocks"], tensors["_scales"]
    if {blocks.dtype, scales.dtype} != {torch.uint8} or blocks.ndim != 4 or blocks.shape[:-1] != scales.shape:
        raise ValueError
    experts, columns, groups, half = blocks.shape
    weight = torch.empty(experts, groups * half * 2, columns, dtype=torch.bfloat16)
    for expert in range(experts):  # all at once would take 5 GiB for a matrix of gpt-oss-20b; this takes 1.8, and less time
        weight[expert] = convert_moe_packed_tensors(blocks[expert, None], scales[expert, None], dtype=torch.bfloat16)[0]
    return weight


def _compressed(tensors: Tensors, config: Any) -> torch.Tensor:
    """A matrix [N,K] in int8 or FP8, with scales for the whole matrix, per row, per group of a row, or per block."""
    matrix, scales, zeros = tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero_point")
    if matrix.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return matrix  # left in floats by training that only simulates quantisation
    dtypes = (*_FP8_DTYPES, torch.int8)
    if matrix.dtype not in dtypes or matrix.ndim != 2:
        raise ValueError
    if scales.ndim == 2 and scales.numel() > 1 and scales.shape[0] != matrix.shape[0]:
        return _scale_blocks(matrix, scales, block_structure(quantization_config(config)), dtypes)
    return _dequantise_groups(matrix, _per_row(_scale_factors(scales), matrix), 0 if zeros is None else _per_row(zeros, matrix))


def _packed(tensors: Tensors, config: Any) -> torch.Tensor:
    """Levels [N, K * bits / 32] in int32, zero points [N * bits / 32, groups] in int32 or in int8; or FP4 [N, K / 2] in uint8.

    NVFP4's scales are divided by one global scale.
    """
    packed, scales, zeros = tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero_point")
    if packed.dtype == torch.uint8:
        return _dequantise_groups(_unpack_fp4(packed), _scale_factors(scales) / tensors.get("weight_global_scale", 1.0), 0)
    rows, columns = (int(size) for size in tensors["weight_shape"])
    bits = packed.shape[1] * 32 // columns
    levels, middle = _unpack_words(packed, bits)[:, :columns], 1 << (bits - 1)
    if zeros is None:
        zero_points: torch.Tensor | int = middle
    elif zeros.dtype == torch.int32:
        zero_points = _unpack_words(zeros.T, bits)[:, :rows].T
    else:
        zero_points = _per_row(zeros, levels).float() + middle
    if levels.shape != (rows, columns):
        raise ValueError
    groups = tensors.get("weight_g_idx")
    return _dequantise_groups(
        levels, _per_row(scales, levels), zero_points, None if groups is None or (groups < 0).all() else groups
    )


def _modelopt(tensors: Tensors, config: Any) -> torch.Tensor:
    """A matrix [N,K] in FP8 with its scale, or FP4 [N, K / 2] in uint8 with scales [N, K / 16] and one that multiplies all."""
    if tensors["weight"].dtype == torch.uint8:
        return _dequantise_groups(_unpack_fp4(tensors["weight"]), tensors["weight_scale"].float() * tensors["weight_scale_2"], 0)
    return _compressed(tensors, config)


def _gptq(tensors: Tensors, config: Any) -> torch.Tensor:
    """Levels [K * bits / 32, N], zero points [groups, N * bits / 32], both in int32; scales [groups, N].

    Format "gptq", the older one, stores zero points minus one.
    """
    scales, groups = tensors["scales"], tensors.get("g_idx")
    bits = tensors["qzeros"].shape[1] * 32 // scales.shape[1]
    zeros = _unpack_words(tensors["qzeros"], bits)
    if "gptq" in layouts(quantization_config(config)):
        zeros = (zeros + 1) & ((1 << bits) - 1)
    levels = _unpack_words(tensors["qweight"].T, bits)
    groups = _groups_by_size(levels.shape[1], len(scales), config) if groups is None else groups  # AutoRound writes no g_idx
    return _oriented(_dequantise_groups(levels, scales.T, zeros.T, groups), config)


def _awq(tensors: Tensors, config: Any) -> torch.Tensor:
    """Levels [K, N * 4 / 32] and zero points [groups, N * 4 / 32] in int32, eight numbers a word in AWQ's own order."""
    levels, zeros = (_unpack_words(tensors[name], 4) for name in ("qweight", "qzeros"))
    order = torch.arange(levels.shape[1]).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].flatten()
    groups = _groups_by_size(len(levels), len(tensors["scales"]), config)
    return _oriented(_dequantise_groups(levels[:, order].T, tensors["scales"].T, zeros[:, order].T, groups), config)


def _groups_by_size(columns: int, count: int, config: Any) -> torch.Tensor | None:
    """The group of each input, by the configured group size; the last group may be shorter. None: all groups are equally long."""
    size = quantization_config(config).get("group_size")
    return torch.arange(columns) // size if isinstance(size, int) and size > 0 and -(-columns // size) == count else None


def _bitnet(tensors: Tensors, config: Any) -> torch.Tensor:
    """Levels plus 1, four a byte: [N / 4, K] in uint8, the first quarter of the rows in the lowest bits.

    `autobitlinear` multiplies by the scale, `bitlinear` divides by it.
    """
    packed, scale = tensors["weight"], tensors["weight_scale"].float()
    if packed.dtype != torch.uint8 or packed.ndim != 2 or scale.numel() != 1:
        raise ValueError
    levels = _unpack_bytes(packed, 2).unflatten(1, (-1, 4)).movedim(2, 0).flatten(0, 1)
    multiplies = quantization_config(config).get("linear_class") == "autobitlinear"
    return _dequantise_groups(levels, _per_row(scale if multiplies else 1 / scale, levels), 1)


def _bitsandbytes_4(tensors: Tensors, config: Any) -> torch.Tensor:
    return _oriented(dequantise_4_bit(tensors), config)


def _bitsandbytes_8(tensors: Tensors, config: Any) -> torch.Tensor:
    """LLM.int8() (arXiv 2208.07339): a matrix [N,K] in int8, not in a GPU kernel's order, and each row's absolute maximum [N]."""
    matrix, maxima, order = tensors["weight"], tensors["SCB"], tensors.get("weight_format")
    if matrix.dtype != torch.int8 or matrix.ndim != 2 or maxima.shape != matrix.shape[:1] or (order is not None and order.any()):
        raise ValueError
    return _oriented(_dequantise_groups(matrix, maxima.float()[:, None] / 127, 0), config)


def _oriented(weight: torch.Tensor, config: Any) -> torch.Tensor:
    """A matrix [N,K] in the model's orientation: GPT-2 has [K,N]."""
    return weight.T if config.model_type == "gpt2" else weight


def _unpack_words(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Words [N,M] in int32 -> levels [N, M * 32 / bits] in uint8, the lowest bits of a word first."""
    if packed.dtype != torch.int32 or packed.ndim != 2 or bits not in _PACKED_BITS:
        raise ValueError(f"{bits} bits")
    return _unpack_bytes(packed.contiguous().view(torch.uint8), bits)


def _unpack_bytes(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes [N,M] -> [N, M * 8 / bits], the lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((numbers[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    return _FP4[_unpack_bytes(packed, 4).int()]


def _scale_factors(scales: torch.Tensor) -> torch.Tensor:
    """Scales in fp32; the MX formats store exponents of 2 (E8M0) in uint8."""
    return torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()


def _per_row(scales: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Reshape one scale for the whole matrix [N,K], or one per row, to [N,1]; several per row stay as they are."""
    return scales.reshape(-1, 1).expand(matrix.shape[0], 1) if scales.numel() == 1 or scales.ndim == 1 else scales


def _dequantise_groups(
    levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | int, groups: torch.Tensor | None = None
) -> torch.Tensor:
    """(levels [N,K] - zeros [N,G]) * scales [N,G], in fp32; `groups` [K]: each input's group; None: equal groups in order."""
    rows, columns = levels.shape
    count = scales.shape[1]
    if scales.shape[0] != rows or not scales.is_floating_point() or (groups is None and columns % count):
        raise ValueError
    if isinstance(zeros, torch.Tensor) and zeros.shape != scales.shape:
        raise ValueError
    index = torch.arange(columns) // (columns // count) if groups is None else groups.long()
    if index.shape != (columns,) or not 0 <= int(index.min()) <= int(index.max()) < count:
        raise ValueError
    weight = torch.empty(rows, columns)
    for start in range(0, rows, _CHUNK_ROWS):  # scales and zero points per number would take two more matrices
        part = slice(start, start + _CHUNK_ROWS)
        zero_points = zeros[part].float()[:, index] if isinstance(zeros, torch.Tensor) else zeros
        torch.mul(levels[part].float() - zero_points, scales[part].float()[:, index], out=weight[part])
    return weight


_FORMS: dict[str | None, tuple[_Form, ...]] = {  # quant_method -> how files hold its matrices
    "fp8": (_Form(levels="", scales="_scale_inv", dequantise=_block_fp8),),
    "mxfp4": (_Form(levels="_blocks", scales="_scales", dequantise=_mxfp4),),
    "compressed-tensors": (
        _Form(levels="weight", scales="weight_scale", optional=("weight_zero_point",), result="weight", dequantise=_compressed),
        _Form(
            levels="weight_packed",
            scales="weight_scale",
            optional=("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"),
            result="weight",
            dequantise=_packed,
        ),
    ),
    "modelopt": (
        _Form(levels="weight", scales="weight_scale", optional=("weight_scale_2",), result="weight", dequantise=_modelopt),
    ),
    "gptq": (_Form(levels="qweight", scales="scales", optional=("qzeros", "g_idx"), result="weight", dequantise=_gptq),),
    "awq": (_Form(levels="qweight", scales="scales", optional=("qzeros",), result="weight", dequantise=_awq),),
    "bitnet": (_Form(levels="weight", scales="weight_scale", result="weight", dequantise=_bitnet),),
    "bitsandbytes": (
        _Form(
            levels="weight",
            scales="weight.absmax",
            optional=("weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *STATE_NAMES),
            result="weight",
            dequantise=_bitsandbytes_4,
        ),
        _Form(levels="weight", scales="SCB", optional=("weight_format",), result="weight", dequantise=_bitsandbytes_8),
    ),
}
