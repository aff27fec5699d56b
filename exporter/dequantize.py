"""Matrices that a checkpoint holds quantised, as numbers again: one at a time, as they are read, in fp32 or as exactly.

    fp8                 DeepSeek, MiniMax, Qwen: `weight` in FP8, `weight_scale_inv` for each block of it
    mxfp4               gpt-oss' experts: `_blocks` of two numbers a byte, `_scales`; transformers itself dequantises them
    compressed-tensors  llm-compressor: `weight` in int8 or FP8, or `weight_packed`; `weight_scale`, `weight_zero_point`
    gptq, awq           `qweight`, `qzeros`, `scales`, and of GPTQ perhaps `g_idx`, the group of each input

Engines compute with them as with any others: of schemes that round activations too (W8A8) the weights alone are taken. Scales are
multiplied in fp32, whatever they are stored in, so that what lay on levels goes on doing so, and `--quantize` can keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import FineGrainedFP8Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.architectures import IN_MXFP4
from skipdecode.exporter.config_json import taking_config

Read = Callable[[], torch.Tensor]
Tensors = dict[str, torch.Tensor]  # of one matrix, by what their names end in
Settings = Mapping[str, Any]  # config.json's quantization_config
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP4 = torch.tensor([sign * size for sign in (1, -1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])  # E2M1, by their bits
_BITS = (2, 4, 8)  # of which a byte holds a whole number
_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How a file holds a quantised matrix: in tensors whose names begin alike."""

    levels: str  # what the names end in: of its numbers ..
    scales: str  # .. of their scales, without which it is not quantised ..
    more: tuple[str, ...] = ()  # .. of what may be there as well ..
    gives: str = ""  # .. and of the matrix itself
    numbers: Callable[[Tensors, Any], torch.Tensor]  # of its tensors and the model's configuration


def check_quantised(settings: Settings, model_type: str, where: str) -> None:
    """Refuse weights that are quantised in another way than those that `dequantised` reads.

    Raises:
        ModelNotSupportedError: another method, another layout of a known one, or settings that transformers does not take.
    """
    method = str(settings.get("quant_method", "some method"))
    if method == "fp8":
        with taking_config(where):
            FineGrainedFP8Config.from_dict(dict(settings))
    known = method in _FORMS and (method != "mxfp4" or model_type in IN_MXFP4)
    other = sorted(_layouts(settings) - _LAYOUTS.get(method, set())) if known else [method]
    if other:
        named = ", ".join(dict.fromkeys([method, *other]))
        raise ModelNotSupportedError(
            f"its weights are quantised ({named})", "name the checkpoint that it was made from, and use --quantize", where=where
        )


def dequantised(stored: Mapping[str, Read], config: Any) -> dict[str, Read]:
    """The same tensors, quantised matrices by the names and as the numbers that they stand for; read when asked for.

    Raises:
        ModelNotSupportedError: when read: tensors that do not fit together.
    """
    found = dict(stored)
    for form in _FORMS.get(_settings(config).get("quant_method"), ()):
        for name in [name for name in stored if name.endswith(form.levels)]:
            stem = name.removesuffix(form.levels)
            if stem + form.scales not in stored:
                continue
            ends = [end for end in (form.levels, form.scales, *form.more) if stem + end in stored]
            parts = {end: found.pop(stem + end) for end in ends}
            found[stem + form.gives] = partial(_read, stem + form.gives, form, parts, config)
    return found


def in_few_bits(config: Any) -> bool:
    """Whether a checkpoint's matrices are integers of 4 bits or less: levels that `--quantize int4` keeps."""
    settings = _settings(config)
    if settings.get("quant_method") == "compressed-tensors":
        return any(each.get("type", "int") == "int" and each.get("num_bits") in range(5) for each in _weights(settings))
    return settings.get("quant_method") in ("gptq", "awq") and settings.get("bits", 4) in range(5)


def _settings(config: Any) -> Settings:
    return getattr(config, "quantization_config", None) or {}


def _read(name: str, form: _Form, parts: Mapping[str, Read], config: Any) -> torch.Tensor:
    tensors = {end: read() for end, read in parts.items()}
    found = " and ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors.values())
    try:
        return form.numbers(tensors, config)
    except (ValueError, RuntimeError, LookupError, ArithmeticError) as error:  # ours first, then of shapes, tensors, sizes of 0
        why = f"{found}{f': {error}' if isinstance(error, ValueError) and str(error) else ''}"
        raise ModelNotSupportedError(f"{name} cannot be put together ({why})", "give an unquantised checkpoint") from error


def _layouts(settings: Settings) -> set[str]:
    """What a checkpoint says of how it is stored, beside the method."""
    method = settings.get("quant_method")
    if method == "gptq":
        return {str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()}
    if method == "awq":
        return {str(settings.get("version") or settings.get("format") or "gemm").lower()}
    if method != "compressed-tensors":
        return set()
    parts = [settings, *_tables(settings.get("config_groups")).values(), _tables(settings).get("sparsity_config", {})]
    turned = {"transform_config"} if settings.get("transform_config") else set()  # rows would be rotated as they are computed
    return {str(part["format"]) for part in parts if part.get("format")} | turned


def _tables(settings: Any) -> dict[str, dict[str, Any]]:
    """Those of a table's entries that are tables."""
    entries = settings.items() if isinstance(settings, Mapping) else ()
    return {name: value for name, value in entries if isinstance(value, dict)}


def _weights(settings: Settings) -> list[dict[str, Any]]:
    """What compressed-tensors says of weights, for groups of matrices."""
    return [_tables(group).get("weights", {}) for group in _tables(settings.get("config_groups")).values()]


def _in_blocks(tensors: Tensors, config: Any) -> torch.Tensor:
    return _unscale(tensors[""], tensors["_scale_inv"], _settings(config).get("weight_block_size"), _FP8)


def _unscale(
    matrix: torch.Tensor, scales: torch.Tensor, block: Sequence[int] | None, dtypes: Container[torch.dtype]
) -> torch.Tensor:
    """A matrix [..,N,K] and, a block of it, a factor [..,ceil(N/n),ceil(K/k)]; of all of it where `block` is None.

    transformers' dequantiser of FP8 divides a matrix evenly into as many blocks as there are factors, which is wrong where the
    last block is a smaller one.
    """
    *more, rows, columns = matrix.shape if matrix.ndim > 1 else (0, 0)
    height, width = block or (rows, columns)
    blocks = torch.Size((*more, -(-rows // height), -(-columns // width))) if rows and columns else torch.Size((0,))
    if matrix.dtype not in dtypes or not scales.is_floating_point() or scales.numel() != blocks.numel():
        raise ValueError(f"with blocks of {height} x {width}")
    factors = scales.float().reshape(blocks).repeat_interleave(height, dim=-2)[..., :rows, :]
    weight = matrix.float()
    for start in range(0, columns, width):  # a factor a number would be a second matrix
        weight[..., start : start + width] *= factors[..., start // width, None]
    return weight


def _in_mxfp4(tensors: Tensors, config: Any) -> torch.Tensor:
    """Blocks [E,N,K/32,16] of two numbers a byte and their exponents [E,N,K/32], both uint8 -> [E,K,N] in bf16, exactly."""
    blocks, scales = tensors["_blocks"], tensors["_scales"]
    if {blocks.dtype, scales.dtype} != {torch.uint8} or blocks.ndim != 4 or blocks.shape[:-1] != scales.shape:
        raise ValueError
    experts, columns, groups, half = blocks.shape
    weight = torch.empty(experts, groups * half * 2, columns, dtype=torch.bfloat16)
    for expert in range(experts):  # all at once take 5 GiB for a matrix of gpt-oss-20b's, one after another 1.8, in less time
        weight[expert] = convert_moe_packed_tensors(blocks[expert, None], scales[expert, None], dtype=torch.bfloat16)[0]
    return weight


def _compressed(tensors: Tensors, config: Any) -> torch.Tensor:
    """A matrix [N,K] in int8 or FP8, its scales for all of it, for a row, for groups of a row, or for blocks."""
    matrix, scales, zeros = tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero_point")
    if matrix.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return matrix  # scales of a training that only simulates
    dtypes = (*_FP8, torch.int8)
    if matrix.dtype not in dtypes or matrix.ndim != 2:
        raise ValueError
    if scales.ndim == 2 and scales.numel() > 1 and scales.shape[0] != matrix.shape[0]:
        return _unscale(matrix, scales, _block(_settings(config)), dtypes)
    return _grouped(matrix, _by_row(_factors(scales), matrix), 0 if zeros is None else _by_row(zeros, matrix))


def _block(settings: Settings) -> Sequence[int]:
    """Rows and columns of compressed-tensors' blocks, which it says for groups of matrices."""
    sizes = [group["block_structure"] for group in _weights(settings) if group.get("block_structure")]
    first = sizes[0] if sizes else None
    if not isinstance(first, list) or len(first) != 2 or not all(isinstance(size, int) and size > 0 for size in first):
        raise ValueError(f"block_structure is {first!r}")
    if any(size != first for size in sizes):
        raise ValueError("there are blocks of several sizes")
    return first


def _packed(tensors: Tensors, config: Any) -> torch.Tensor:
    """Levels [N, K * bits / 32] in int32; zero points [N * bits / 32, groups] or in int8; or FP4 [N, K / 2] in uint8.

    Of NVFP4 all scales are divided by one more.
    """
    packed, scales, zeros = tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero_point")
    if packed.dtype == torch.uint8:
        return _grouped(_FP4[_fields(packed, 4).int()], _factors(scales) / tensors.get("weight_global_scale", 1.0), 0)
    rows, columns = (int(size) for size in tensors["weight_shape"])
    bits = packed.shape[1] * 32 // columns
    levels, middle = _unpacked(packed, bits)[:, :columns], 1 << (bits - 1)
    if zeros is None:
        around: torch.Tensor | int = middle
    elif zeros.dtype == torch.int32:
        around = _unpacked(zeros.T, bits)[:, :rows].T
    else:
        around = _by_row(zeros, levels).float() + middle
    if levels.shape != (rows, columns):
        raise ValueError
    groups = tensors.get("weight_g_idx")
    return _grouped(levels, _by_row(scales, levels), around, None if groups is None or (groups < 0).all() else groups)


def _gptq(tensors: Tensors, config: Any) -> torch.Tensor:
    """Levels [K * bits / 32, N], zero points [groups, N * bits / 32], both in int32; scales [groups, N].

    In the first of its formats zero points are stored less one.
    """
    scales, groups = tensors["scales"], tensors.get("g_idx")
    bits = tensors["qzeros"].shape[1] * 32 // scales.shape[1]
    zeros = _unpacked(tensors["qzeros"], bits)
    if "gptq" in _layouts(_settings(config)):
        zeros = (zeros + 1) & ((1 << bits) - 1)
    weight = _grouped(_unpacked(tensors["qweight"].T, bits), scales.T, zeros.T, groups)
    return weight.T if config.model_type == "gpt2" else weight  # whose matrices are [K,N]


def _awq(tensors: Tensors, config: Any) -> torch.Tensor:
    """Levels [K, N * 4 / 32], zero points [groups, N * 4 / 32], both in int32 and eight numbers in an order of their own."""
    levels, zeros = (_unpacked(tensors[name], 4) for name in ("qweight", "qzeros"))
    order = torch.arange(levels.shape[1]).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].flatten()
    weight = _grouped(levels[:, order].T, tensors["scales"].T, zeros[:, order].T)
    return weight.T if config.model_type == "gpt2" else weight


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Words [N,M] in int32 -> levels [N, M * 32 / bits] in uint8, the lowest bits of a word first."""
    if packed.dtype != torch.int32 or packed.ndim != 2 or bits not in _BITS:
        raise ValueError(f"{bits} bits")
    return _fields(packed.contiguous().view(torch.uint8), bits)


def _fields(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes [N,M] -> [N, M * 8 / bits], the lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((numbers[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _factors(scales: torch.Tensor) -> torch.Tensor:
    """Scales as numbers: those of the MX formats are exponents of 2 (E8M0)."""
    return torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()


def _by_row(scales: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """One number for the whole matrix [N,K], or one a row, as [N,1]; as they are where a row has several."""
    return scales.reshape(-1, 1).expand(matrix.shape[0], 1) if scales.numel() == 1 or scales.ndim == 1 else scales


def _grouped(
    levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | int, groups: torch.Tensor | None = None
) -> torch.Tensor:
    """(levels [N,K] - zeros [N,G]) * scales [N,G], in fp32; `groups` [K]: the group of each input, else they lie in order."""
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
    for start in range(0, rows, _ROWS_AT_A_TIME):  # scales and zero points a number would be two more matrices
        part = slice(start, start + _ROWS_AT_A_TIME)
        around = zeros[part].float()[:, index] if isinstance(zeros, torch.Tensor) else zeros
        torch.mul(levels[part].float() - around, scales[part].float()[:, index], out=weight[part])
    return weight


_FORMS: dict[str | None, tuple[_Form, ...]] = {  # quant_method -> how its matrices lie
    "fp8": (_Form(levels="", scales="_scale_inv", numbers=_in_blocks),),
    "mxfp4": (_Form(levels="_blocks", scales="_scales", numbers=_in_mxfp4),),
    "compressed-tensors": (
        _Form(levels="weight", scales="weight_scale", more=("weight_zero_point",), gives="weight", numbers=_compressed),
        _Form(
            levels="weight_packed",
            scales="weight_scale",
            more=("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"),
            gives="weight",
            numbers=_packed,
        ),
    ),
    "gptq": (_Form(levels="qweight", scales="scales", more=("qzeros", "g_idx"), gives="weight", numbers=_gptq),),
    "awq": (_Form(levels="qweight", scales="scales", more=("qzeros",), gives="weight", numbers=_awq),),
}
_LAYOUTS = {  # quant_method -> what of `_layouts` is read
    "compressed-tensors": {
        "dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision",
        "mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized",
    },
    "gptq": {"gptq", "gptq_v2"},
    "awq": {"gemm"},
}  # fmt: skip
