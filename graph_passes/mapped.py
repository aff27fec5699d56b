"""Weights are read by mapping their file: what has been read stays resident until it is given back."""

from __future__ import annotations

import onnx_ir as ir


def release_pages(*tensors: ir.TensorProtocol | None) -> None:
    """Give back the pages of mapped tensors that nothing refers to any more; the next read maps them again."""
    for tensor in tensors:
        if isinstance(tensor, ir.ExternalTensor):
            tensor.release()
