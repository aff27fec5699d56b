"""Write weights, one tensor at a time, into one `weights.safetensors` that every graph refers to."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, repeat
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from skipdecode.cpu import usable_cores
from skipdecode.errors import ModelNotSupportedError, TargetError

WEIGHTS = "weights.safetensors"
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# parameters in which -inf is valid: for a token, an attention sink or an expert that is never chosen
_NEGATIVE_INFINITY_ALLOWED = ("lm_head.bias", "sinks", "e_score_correction_bias")
_SCALE_VECTORS = ("weight", "layer_scalar", "router.scale", "per_expert_scale")  # vectors that something is multiplied by
_BLOCK_SIZE = 1 << 20  # random numbers per generator
IR_TYPES = {torch.float32: ir.DataType.FLOAT, torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """Where each parameter lies in `weights.safetensors`."""

    folder: Path
    dtype: torch.dtype
    places: dict[str, tuple[int, tuple[int, ...]]]  # parameter -> (byte offset, shape)

    def external(self, name: str) -> ir.ExternalTensor:
        """An ONNX tensor that refers to parameter `name` by file, offset and length."""
        offset, shape = self.places[name]
        return ir.ExternalTensor(
            WEIGHTS, offset, math.prod(shape) * self.dtype.itemsize, IR_TYPES[self.dtype],
            shape=ir.Shape(shape), name=name, base_dir=self.folder,
        )  # fmt: skip


TensorSource = Callable[[str, tuple[int, ...]], torch.Tensor]


def write_weights(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    source: TensorSource,
    advance: Callable[[int], None],
    where: str = "",
) -> WeightFile:
    """Write `folder/weights.safetensors`; never holds more than one tensor.

    Args:
        shapes: every parameter, tied ones once.
        source: returns a parameter, in any float dtype.
        advance: called with the bytes written after each tensor.
        where: what `source` reads, for errors.

    Raises:
        TargetError: a number that fp16 cannot hold.
        ModelNotSupportedError: NaN, or an infinite number where it does not mean "never".
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # tensors start aligned, so that they can be mapped
    start = 8 + len(text)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            tensor = _cast(source(name, shape), dtype, name, where).contiguous()
            file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
            advance(tensor.nbytes)
    places = {name: (start + entry["data_offsets"][0], tuple(entry["shape"])) for name, entry in header.items()}
    return WeightFile(folder=folder, dtype=dtype, places=places)


def _cast(original: torch.Tensor, dtype: torch.dtype, name: str, where: str) -> torch.Tensor:
    tensor = original.to(dtype)
    # a NaN makes both ends NaN; this costs a tenth of the writing if nothing is cast, a thirtieth if fp32 is written
    if tensor.numel() and not all(end.isfinite() for end in torch.aminmax(tensor)):
        _check_finite(original, tensor, name, where)
    return tensor


def _check_finite(original: torch.Tensor, tensor: torch.Tensor, name: str, where: str) -> None:
    """Refuse numbers that are not finite in `tensor`, which is `original` cast to the dtype that is written."""
    wrong = original[~tensor.isfinite()]
    if name.endswith(_NEGATIVE_INFINITY_ALLOWED):
        wrong = wrong[wrong != -math.inf]
    finite = wrong.isfinite()
    if tensor.dtype == torch.float16 and wrong.numel() and bool(finite.all()):
        number = wrong.abs().max().item()
        raise TargetError(
            f"{name} holds {number:.6g}, but the largest number in fp16 is 65504", "choose --dtype bf16", where="--dtype"
        )
    if wrong.numel():
        number = (wrong if bool(finite.all()) else wrong[~finite])[0].item()
        message = f"{name} holds {number:g}, which makes logits NaN"
        raise ModelNotSupportedError(message, "download the checkpoint again, or repair it", where=where)


def random_source() -> TensorSource:
    """Random weights for latency work without a checkpoint: normal with deviation 0.02; of vectors, scales are 1, others 0.

    A tensor depends only on its name. A generator draws on one thread (4 to 7 s for a GB of fp16), so each block of a tensor
    has its own, and cores share the blocks.
    """

    def draw(name: str, index: int, block: torch.Tensor) -> None:
        digest = hashlib.sha256(f"{name} {index}".encode()).digest()
        block.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "little")))

    def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) < 2:
            return torch.ones(shape) if name.endswith(_SCALE_VECTORS) else torch.zeros(shape)
        drawn = torch.empty(shape)
        with ThreadPoolExecutor(usable_cores()) as pool:
            list(pool.map(draw, repeat(name), count(), drawn.view(-1).split(_BLOCK_SIZE)))  # list: raises what a draw raised
        return drawn

    return tensor
