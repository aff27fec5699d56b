"""Rounds a torch model's weights about as much as `--quantize` does, to learn how much that alone changes its logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers.pytorch_utils import Conv1D

from skipdecode.graph_passes.quantization import BLOCK_SIZES

_TURNED_EXPERTS = ("GptOssExperts", "Llama4TextExperts")  # they multiply by [E, inputs, outputs]


@torch.no_grad()  # type: ignore[untyped-decorator]
def round_weights(model: torch.nn.Module, bits: int, *, whole_rows: bool) -> None:
    """Round in place, to nearest, what engines quantise: matrices, experts, and tables of tokens, but not of positions.

    Blocks of inputs share a scale, the largest blocks that `--quantize-block` offers. Routers are rounded too, which engines
    leave as they are; an engine may also find closer levels.

    Args:
        bits: 4 or 8.
        whole_rows: all inputs of an output share a scale, as in TensorRT's int8 plans.
    """
    for weight in _matrices(model):
        inputs = weight.shape[-1]
        block = inputs if whole_rows else max((size for size in BLOCK_SIZES if inputs % size == 0), default=None)
        if block is not None:
            weight.copy_(_rounded(weight.reshape(-1, block), bits).reshape(weight.shape))


def _matrices(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Each matrix [.., outputs, inputs], or a view of it; a tied one once."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) in seen or not _is_quantised(path, module, name, weight):
                continue
            seen.add(id(weight))
            turned = isinstance(module, Conv1D) or type(module).__name__ in _TURNED_EXPERTS
            yield weight.mT if turned else weight


def _is_quantised(path: str, module: torch.nn.Module, name: str, weight: torch.Tensor) -> bool:
    if isinstance(module, torch.nn.Embedding):
        return "position" not in path and not path.endswith("wpe")
    if isinstance(module, (torch.nn.Linear, Conv1D)):
        return name == "weight"
    is_gate = name.endswith("gate_weight")  # Griffin's
    return weight.ndim == 3 and not is_gate and not isinstance(module, torch.nn.Conv1d)  # experts


def _rounded(blocks: torch.Tensor, bits: int) -> torch.Tensor:
    """Each block, [N,b], in whole multiples of the step that makes its largest number the lowest level."""
    lowest = -(1 << (bits - 1))
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    step = torch.where(largest == 0, 1.0, largest / lowest)
    return (blocks / step).round().clamp(lowest, -lowest - 1) * step
