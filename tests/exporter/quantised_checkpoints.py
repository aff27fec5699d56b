"""Checkpoints with quantised weights, laid out as their publishers write them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

import skipdecode
from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.checkpoint import CheckpointSource
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.model_names import load_config
from skipdecode.exporter.skeleton import build_skeleton
from skipdecode.exporter.weights import TensorSource
from skipdecode.schedule_builders import ScheduleRequest
from tests.agreement import assert_gives_the_references_logits
from tests.models import MAX_LENGTH
from tests.zoo import edit_config

Store = Callable[[torch.Tensor], dict[str, torch.Tensor]]  # a matrix -> what a file stores of it, by the ends of names
WEIGHTS = {  # llm-compressor's schemes: the layout, and what its config.json says of weights
    "W4A16": ("pack-quantized", {"num_bits": 4, "group_size": 32, "strategy": "group"}),
    "W4A16, asymmetric": ("pack-quantized", {"num_bits": 4, "group_size": 16, "strategy": "group", "symmetric": False}),
    "W8A16, a row": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "W8A8, a row": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "W8A8, asymmetric": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "FP8, a row": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "FP8, a matrix": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "FP8, a block": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}),
    "MXFP4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "scale_dtype": "uint8"},
    ),
    "MXFP8": ("mxfp8-quantized", {"num_bits": 8, "type": "float", "group_size": 32, "strategy": "group", "scale_dtype": "uint8"}),
    "NVFP4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "scale_dtype": "float8_e4m3fn"},
    ),
}


def source(folder: Path) -> TensorSource:
    """The source of a checkpoint's tensors, dequantised."""
    return CheckpointSource(folder, build_skeleton(load_config(str(folder))[0]))


def assert_reads(folder: Path, expected: dict[str, torch.Tensor], rounding: float = 0) -> None:
    """A checkpoint's parameters are read as `expected`, each number to within `rounding` as a share of it."""
    skeleton = build_skeleton(load_config(str(folder))[0])
    read = CheckpointSource(folder, skeleton)
    for parameter, shape in skeleton.shapes.items():
        torch.testing.assert_close(read(parameter, shape).float(), expected[parameter], rtol=rounding, atol=0)


def assert_runs(folder: Path, model: Any, quantize: str = "none", tolerance: float = 1e-3) -> None:
    """A bundle exported from the checkpoint gives the logits of transformers' model."""
    bundle, full = folder.with_suffix(".bundle"), ScheduleRequest(name="full")
    export(ExportRequest(model=str(folder), out=bundle, schedule=full, max_length=MAX_LENGTH, quantize=quantize))
    decoder = skipdecode.load(bundle).decoder([9], 3)
    assert_gives_the_references_logits(decoder, model, [[9, 8, 7, 6, 5, 4, 3, 17, 23]], 3, tolerance)


def assert_refused(
    folder: Path, change: Mapping[str, torch.Tensor | None], says: str, parameter: str, shape: tuple[int, ...]
) -> None:
    """Put these tensors into a checkpoint, without those that are None: reading `parameter` fails with one line."""
    state = load_file(folder / "model.safetensors") | change
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, folder / "model.safetensors")
    with pytest.raises(ModelNotSupportedError, match=says) as caught:
        source(folder)(parameter, shape)
    assert "\n" not in str(caught.value)


def rewritten(checkpoint: Path, folder: Path, settings: dict[str, Any], store: Store) -> Path:
    """A copy of a checkpoint whose matrices, except embedding and head, are as `store` writes them."""
    shutil.copytree(checkpoint, folder)
    edit_config(folder, dtype="bfloat16", quantization_config=settings)
    state = load_file(folder / "model.safetensors")
    for name in [name for name, tensor in state.items() if ("_proj" in name or ".fc" in name) and tensor.ndim == 2]:
        state |= {name.removesuffix("weight") + end: part for end, part in store(state.pop(name)).items()}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def in_fp8(checkpoint: Path, folder: Path, block: tuple[int, int] | None) -> Path:
    """A checkpoint as DeepSeek writes it: matrices in FP8 with a scale per block, or per matrix where `block` is None."""

    def store(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = [-(-size // length) for size, length in zip(matrix.shape, block or matrix.shape, strict=True)]
        numbers = torch.randn(matrix.shape).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale_inv": 0.02 + 0.1 * torch.rand(blocks if block else ())}

    torch.manual_seed(0)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    return rewritten(checkpoint, folder, settings, store)


def compressed(checkpoint: Path, folder: Path, name: str) -> Path:
    """A checkpoint as llm-compressor writes it, with the library that it uses; in fp32, so that scales are not rounded."""
    layout, given = WEIGHTS[name]
    arguments = QuantizationArgs(**given)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)

    def store(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = matrix.shape
        height, width = {
            "tensor": (rows, columns),
            "channel": (1, columns),
            "group": (1, given.get("group_size")),
            "tensor_group": (1, given.get("group_size")),
            "block": tuple(given.get("block_structure", ())),
        }[given["strategy"]]
        blocks = matrix.unflatten(0, (-1, height)).unflatten(2, (-1, width)) + (0.05 if not arguments.symmetric else 0)
        whole = {"weight_global_scale": generate_gparam(matrix.min(), matrix.max())} if layout.startswith("nvfp4") else {}
        scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), arguments, whole.get("weight_global_scale"))
        parts = {"weight": matrix, "weight_scale": scale.float(), "weight_zero_point": zero.to(arguments.zp_dtype or torch.int8)}
        parts |= {name: number.reshape(1) for name, number in whole.items()}
        return BaseCompressor.get_value_from_registry(layout).compress(parts, scheme)

    group = {"targets": ["Linear"], "weights": arguments.model_dump(mode="json"), "format": layout}
    settings = {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip
    return rewritten(checkpoint, folder, settings, store)


def gptq(
    bits: int, numbers: list[torch.Tensor], *, layout: str = "gptq", shuffled: bool = False, size: int | None = None
) -> Store:
    """Store as GPTQModel packs: inputs in words, and in the first layout zero points less one.

    Args:
        numbers: filled with what each stored matrix stands for.
        size: of a group of inputs, the last one taking what is left; None: four groups.
    """

    def store(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        group = torch.arange(matrix.shape[1]) // (size or matrix.shape[1] // 4)
        group = group[torch.randperm(len(group))] if shuffled else group
        levels, zeros, scales = _rounded(matrix, bits, group)
        numbers.append((levels - zeros[:, group]) * scales.float()[:, group])
        in_order = [*range(32 // bits)]
        stored = (zeros - 1) % (1 << bits) if layout == "gptq" else zeros
        parts = {"qweight": _words(levels, bits, in_order).T, "qzeros": _words(stored.T, bits, in_order), "scales": scales.T}
        return parts | ({"g_idx": group.int()} if shuffled else {})

    return store


def bitnet(numbers: list[torch.Tensor], *, divides: bool = False) -> Store:
    """Store as transformers packs -1, 0 and 1; `divides`: with the inverse scale, by which one of its layers divides."""

    def store(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        mean = matrix.abs().mean()
        signs = (matrix / mean).round().clamp(-1, 1)
        numbers.append(signs * (1 / (1 / mean) if divides else mean))
        quarters = (signs + 1).to(torch.uint8).chunk(4)
        packed = torch.stack([part << (2 * place) for place, part in enumerate(quarters)]).sum(0, dtype=torch.uint8)
        return {"weight": packed, "weight_scale": (1 / mean if divides else mean).reshape(1)}

    return store


def awq(numbers: list[torch.Tensor]) -> Store:
    """Store as AutoAWQ packs for its GEMM kernel: outputs in words, in an order of its own."""

    def store(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        group = torch.arange(matrix.shape[1]) // 32
        levels, zeros, scales = _rounded(matrix, 4, group)
        numbers.append((levels - zeros[:, group]) * scales.float()[:, group])
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return {"qweight": _words(levels.T, 4, order), "qzeros": _words(zeros.T, 4, order), "scales": scales.T}

    return store


def modelopt(algorithm: str, numbers: list[torch.Tensor]) -> Store:
    """Store as NVIDIA's ModelOpt writes: FP8 with one scale, or FP4, two a byte, with an FP8 scale per 16 and one for all."""

    def store(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        if algorithm == "FP8":
            scale = matrix.abs().max() / 448
            stored = (matrix / scale).to(torch.float8_e4m3fn)
            numbers.append(stored.float() * scale)
            return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.01)}
        second = matrix.abs().max() / (6 * 448)
        groups = matrix.unflatten(1, (-1, 16))
        scales = (groups.abs().amax(2) / 6 / second).clamp(min=2**-9).to(torch.float8_e4m3fn)
        factors = (scales.float() * second)[..., None]
        sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        nearest = ((groups.abs() / factors)[..., None] - sizes).abs().argmin(-1)
        numbers.append((sizes[nearest] * groups.sign() * factors).flatten(1))
        bits = (nearest + 8 * (groups < 0)).flatten(1).to(torch.uint8)
        return {"weight": bits[:, 0::2] + 16 * bits[:, 1::2], "weight_scale": scales, "weight_scale_2": second}

    return store


def _rounded(matrix: torch.Tensor, bits: int, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise a matrix [N,K] by the group of each input: levels [N,K], zero points and scales [N,G] for each group's range."""
    parts = [matrix[:, group == index] for index in range(int(group.max()) + 1)]
    lowest = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    highest = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
    scales = ((highest - lowest) / ((1 << bits) - 1)).half()
    zeros = (-lowest / scales.float()).round().int()
    levels = ((matrix / scales.float()[:, group]).round() + zeros[:, group]).clamp(0, (1 << bits) - 1).int()
    return levels, zeros, scales


def _words(levels: torch.Tensor, bits: int, order: list[int]) -> torch.Tensor:
    """Pack levels [N,K] into words of 32 bits: of a word's levels number `order[i]` is at bit `i * bits`."""
    several = levels.long().unflatten(1, (-1, len(order)))[..., order]
    words = sum(several[..., place] << (bits * place) for place in range(len(order)))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.uint32).view(torch.int32)
