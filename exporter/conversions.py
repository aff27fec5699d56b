"""What transformers makes of a checkpoint's tensors while it loads them: new names, and all experts' matrices in one tensor.

A file has `experts.3.up_proj.weight`, the model `experts.gate_up_proj` [E,2I,H]; transformers itself says which becomes which.
Of experts in MXFP4 (gpt-oss) a file has `experts.gate_up_proj_blocks` and `_scales`; transformers itself dequantises them.
Of matrices in FP8 (DeepSeek, MiniMax, Qwen) it has `weight` and, a number a block, `weight_scale_inv`. Its dequantiser divides a
matrix evenly into as many blocks as there are numbers, which is wrong where the last block is a smaller one; so here is ours.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from skipdecode.errors import ModelNotSupportedError

Read = Callable[[], torch.Tensor]
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def converted(stored: Mapping[str, Read], config: Any) -> dict[str, Read]:
    """Tensors that a file holds under other names or in pieces, by the model's parameter names; read when asked for.

    Raises:
        ModelNotSupportedError: when read: pieces that do not fit together.
    """
    rules = get_checkpoint_conversion_mapping(config.model_type) or []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    found: dict[str, Read] = {}
    pieces: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))  # parameter -> pattern -> names in order
    for name in sorted(stored, key=_by_numbers):
        parameter, pattern = rename_source_key(name, renamings, converters)
        if pattern is not None:
            pieces[parameter][pattern].append(name)
        elif parameter != name:
            found[parameter] = stored[name]
    for parameter, names in pieces.items():
        converter = next(rule for rule in converters if names.keys() <= {*rule.source_patterns})
        found[parameter] = partial(_convert, converter, parameter, names, stored, config)
    return found


def dequantised(stored: Mapping[str, Read]) -> dict[str, Read]:
    """Experts that a file holds in MXFP4, by the model's parameter names, in bf16, which holds them exactly; read when asked for.

    Raises:
        ModelNotSupportedError: when read: blocks and scales that do not fit together.
    """
    names = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    return {
        name: partial(_dequantise, name, stored[f"{name}_blocks"], stored[f"{name}_scales"])
        for name in names
        if f"{name}_scales" in stored
    }


def unscaled(stored: Mapping[str, Read], config: Any) -> dict[str, Read]:
    """The same tensors, those in FP8 times their scales, in fp32, without the scales; read when asked for.

    Raises:
        ModelNotSupportedError: when read: a matrix and scales that do not fit together.
    """
    block = dict(getattr(config, "quantization_config", None) or {}).get("weight_block_size")
    return {
        name: partial(_unscale, name, read, stored[f"{name}_scale_inv"], block) if f"{name}_scale_inv" in stored else read
        for name, read in stored.items()
        if not name.endswith("_scale_inv")
    }


def _unscale(name: str, read_matrix: Read, read_scales: Read, block: tuple[int, int] | None) -> torch.Tensor:
    """A matrix [..,N,K] in FP8 and, a block of it, a factor [..,ceil(N/n),ceil(K/k)]; of all of it where `block` is None."""
    matrix, scales = read_matrix(), read_scales()
    *more, rows, columns = matrix.shape if matrix.ndim > 1 else (0, 0)
    height, width = block or (rows, columns)
    blocks = torch.Size((*more, -(-rows // height), -(-columns // width))) if rows and columns else torch.Size((0,))
    if matrix.dtype not in _FP8 or not scales.is_floating_point() or scales.numel() != blocks.numel():
        found = f"{matrix.dtype} {tuple(matrix.shape)} and {scales.dtype} {tuple(scales.shape)} with blocks of {height} x {width}"
        raise ModelNotSupportedError(f"{name} cannot be put together ({found})", "give an unquantised checkpoint")
    factors = scales.float().reshape(blocks).repeat_interleave(height, dim=-2)[..., :rows, :]
    weight = matrix.float()
    for start in range(0, columns, width):  # a factor a number would be a second matrix
        weight[..., start : start + width] *= factors[..., start // width, None]
    return weight


def _dequantise(name: str, read_blocks: Read, read_scales: Read) -> torch.Tensor:
    """Blocks [E,N,K/32,16] of two numbers a byte and their exponents [E,N,K/32], both uint8 -> [E,K,N]."""
    blocks, scales = read_blocks(), read_scales()
    if {blocks.dtype, scales.dtype} != {torch.uint8} or blocks.ndim != 4 or blocks.shape[:-1] != scales.shape:
        found = f"{blocks.dtype} {tuple(blocks.shape)} and {scales.dtype} {tuple(scales.shape)}"
        raise ModelNotSupportedError(f"{name} cannot be put together ({found})", "download the checkpoint again")
    experts, columns, groups, half = blocks.shape
    weight = torch.empty(experts, groups * half * 2, columns, dtype=torch.bfloat16)
    for expert in range(experts):  # all at once take 5 GiB for a matrix of gpt-oss-20b's, one after another 1.8, in less time
        weight[expert] = convert_moe_packed_tensors(blocks[expert, None], scales[expert, None], dtype=torch.bfloat16)[0]
    return weight


def _convert(
    converter: WeightConverter, parameter: str, names: Mapping[str, list[str]], stored: Mapping[str, Read], config: Any
) -> torch.Tensor:
    for pattern, keys in names.items():
        for key in keys:
            converter.add_tensor(parameter, key, pattern, stored[key])
    try:
        tensors: dict[str, torch.Tensor] = converter.convert(parameter, config=config)
    except RuntimeError as error:  # of torch.stack and torch.cat
        raise ModelNotSupportedError(f"{parameter} cannot be put together ({error})", "download the checkpoint again") from error
    return tensors[parameter]


def _by_numbers(name: str) -> list[Any]:
    """Expert 10 after expert 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
