"""Weights are read by mapping their file, and pages that have been read stay resident until they are released."""

from __future__ import annotations

import onnx_ir as ir


def release_pages(*tensors: ir.TensorProtocol | None) -> None:
    """Release the pages of mapped tensors that nothing refers to any more; the next read maps them again."""
    for tensor in tensors:
        if isinstance(tensor, ir.ExternalTensor):
            tensor.release()
