"""Dequantises matrices [N,K] that bitsandbytes stores in 4 bits, in blocks of the matrix flattened to N * K numbers.

QLoRA (arXiv 2305.14314, section 3): `weight` holds two codes a byte, the first in the high bits; `quant_map` the 16 numbers that
the codes stand for; `absmax` the factor of each block, perhaps quantised itself to 8-bit codes in larger blocks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

STATE_NAMES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))  # sizes and dtypes, JSON
_CHUNK_BYTES = 1 << 20


def dequantise_4_bit(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Dequantise one matrix to fp32 [N,K]; `tensors` by the ends of their names, such as `weight.absmax`.

    Raises:
        ValueError, TypeError, RuntimeError, LookupError, ArithmeticError: the tensors do not fit together.
    """
    states = [tensors[name] for name in STATE_NAMES if name in tensors]
    state = json.loads(bytes(states[0].tolist()))
    shape, block = state["shape"], state["blocksize"]
    codes = tensors["weight"].contiguous().view(torch.uint8).flatten()  # training may have stored the bytes as another dtype
    values, factors, size = tensors["weight.quant_map"].float(), _factors(tensors, state), math.prod(shape)
    if (len(codes), len(factors), len(values)) != (-(-size // 2), -(-size // block), 16):
        raise ValueError(f"{shape} in blocks of {block}")
    numbers, pairs = torch.empty(max(2 * len(codes), len(factors) * block)), torch.cartesian_prod(values, values)  # byte -> pair
    for start in range(0, len(codes), _CHUNK_BYTES):
        part = codes[start : start + _CHUNK_BYTES]
        numbers[2 * start : 2 * (start + len(part))] = pairs.index_select(0, part.int()).flatten()
    numbers[: len(factors) * block].view(-1, block).mul_(factors[:, None])
    return numbers[:size].view(shape)


def _factors(tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> torch.Tensor:
    """The factor of each block, [blocks] fp32. Factors in 8-bit codes are stored minus their mean, `nested_offset`."""
    factors = tensors["weight.absmax"]
    if "weight.nested_absmax" not in tensors:
        return factors.float()
    outer = tensors["weight.nested_absmax"].float().repeat_interleave(state["nested_blocksize"])[: len(factors)]
    if factors.dtype != torch.uint8 or outer.shape != factors.shape:
        raise ValueError
    return tensors["weight.nested_quant_map"].float()[factors.int()] * outer + state["nested_offset"]
