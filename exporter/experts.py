"""What transformers calls instead of its own experts while a layer is traced: every expert, times its weight or 0.

Standard ONNX has no operator for chosen experts alone; a target's lowering makes one of this (`lower_experts`).
"""

from __future__ import annotations

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from skipdecode.exporter.attention import OPSET

EXPERTS_NAME = "skipdecode_onnx"


def _experts(module: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """SwiGLU experts: hidden [T,H], K of E experts `chosen` for each token [T,K] int64, their weights [T,K] -> [T,H].

    `module` has `gate_up_proj` [E,2I,H], an expert's gate above its up, and `down_proj` [E,H,I].
    """
    tokens, width = hidden.shape
    experts, doubled, _ = module.gate_up_proj.shape
    shares = torch.zeros(tokens, experts, dtype=hidden.dtype).scatter(1, chosen, weights.to(hidden.dtype))
    both = _matmul(hidden[None], module.gate_up_proj.transpose(1, 2), (experts, tokens, doubled))
    gate, up = both.split(doubled // 2, dim=-1)
    products = _matmul(torch.nn.functional.silu(gate) * up, module.down_proj.transpose(1, 2), (experts, tokens, width))
    return (products * shares.T[:, :, None]).sum(0)


def _matmul(left: torch.Tensor, right: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """One MatMul, which broadcasts; torch's own would first write `left` once an expert."""
    product: torch.Tensor = torch.onnx.ops.symbolic("MatMul", (left, right), dtype=left.dtype, shape=shape, version=OPSET)
    return product


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts)
