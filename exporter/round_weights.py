"""Rounds a torch model's weights about as much as `--quantize` does, to learn how much that alone changes its logits."""

from __future__ import annotations

import torch

from skipdecode.graph_passes.quantization import BLOCK_SIZES


@torch.no_grad()  # type: ignore[untyped-decorator]
def round_weights(model: torch.nn.Module, bits: int, *, whole_rows: bool) -> None:
    """Round every matrix and table in place, symmetrically and to nearest, in the largest blocks that `--quantize-block` offers.

    Where an engine leaves a matrix as it is (a router), or finds closer levels, this rounds more than the engine does.

    Args:
        bits: 4 or 8.
        whole_rows: one scale for each row, as in TensorRT's int8 plans.
    """
    for weight in model.parameters():
        if weight.ndim < 2:
            continue
        width = weight.shape[-1]
        block = width if whole_rows else max((size for size in BLOCK_SIZES if width % size == 0), default=None)
        if block is not None:
            weight.copy_(_rounded(weight.reshape(-1, block), bits).reshape(weight.shape))


def _rounded(blocks: torch.Tensor, bits: int) -> torch.Tensor:
    """Each block, [N,b], in whole multiples of the step that makes its largest number the lowest level."""
    lowest = -(1 << (bits - 1))
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    step = torch.where(largest == 0, 1.0, largest / lowest)
    return (blocks / step).round().clamp(lowest, -lowest - 1) * step
