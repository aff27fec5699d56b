"""What transformers calls instead of its own experts while a layer is traced: every expert, times its weight or 0.

Standard ONNX has no operator for chosen experts alone; a target's lowering makes one of this (`lower_experts`).

Llama 4's mixture does not go through transformers' interface for experts: its experts take each token times its score, and weigh
alike; transformers gives every expert every token, times 0 where it was not chosen. `llama_4_mixture` stands for its `forward`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from skipdecode.exporter.attention import emit_operator

EXPERTS_NAME = "skipdecode_onnx"


def _experts(module: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """hidden [T,H], K of E experts `chosen` for each token [T,K] int64, their weights [T,K] -> [T,H]."""
    products = _biased if module.has_bias else _gated if module.has_gate else _squared
    return _weighed(products(module, hidden), hidden, chosen, weights)


def llama_4_mixture(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B,S,H] -> rows [T,H] and the router's logits [T,E]; a token's one expert (`check_supported`) takes it times its score."""
    hidden = hidden_states.reshape(-1, self.hidden_dim)
    logits = torch.nn.functional.linear(hidden, self.router.weight)
    best, chosen = torch.topk(logits, 1, dim=-1)
    scaled = hidden * torch.sigmoid(best.float()).to(hidden.dtype)
    weights = torch.softmax(best, dim=-1)  # 1 of one, by which a lowering sees that the logits alone choose
    return self.shared_expert(hidden) + _weighed(_halved(self.experts, scaled), scaled, chosen, weights), logits


def _weighed(products: torch.Tensor, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Every expert's product [E,T,H] times its weight or 0, summed up: [T,H]."""
    weights, experts = weights.to(hidden.dtype), products.shape[0]
    # a product, as zeros of a size that is worked out at run time are nodes that ONNX Runtime's CUDA provider leaves to the CPU
    none = torch.matmul(weights, torch.zeros(weights.shape[1], experts, dtype=hidden.dtype))
    shares = none.scatter(1, chosen, weights)
    weighed, first = products * shares.T[:, :, None], torch.zeros(1, dtype=torch.int64)
    # the operator itself: of narrow floats torch's own would first be traced as a cast to fp32
    return emit_operator("ReduceSum", weighed, first, shape=hidden.shape, keepdims=0)


def _gated(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Experts with a gate, [T,H] -> [E,T,H]: `gate_up_proj` [E,2I,H], an expert's gate above its up, and `down_proj` [E,H,I]."""
    tokens, width = hidden.shape
    experts, doubled, _ = module.gate_up_proj.shape
    both = _matmul(hidden[None], module.gate_up_proj.transpose(1, 2), (experts, tokens, doubled))
    gate, up = both.split(doubled // 2, dim=-1)
    return _matmul(module.act_fn(gate) * up, module.down_proj.transpose(1, 2), (experts, tokens, width))


def _halved(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Llama 4's: `gate_up_proj` [E,H,2I], gates beside ups, and `down_proj` [E,I,H]."""
    tokens, width = hidden.shape
    experts, _, doubled = module.gate_up_proj.shape
    gate, up = _matmul(hidden[None], module.gate_up_proj, (experts, tokens, doubled)).split(doubled // 2, dim=-1)
    return _matmul(torch.nn.functional.silu(gate) * up, module.down_proj, (experts, tokens, width))


def _squared(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Nemotron-H's, with no gate and the square of a ReLU: `up_proj` [E,I,H] and `down_proj` [E,H,I]."""
    tokens, width = hidden.shape
    experts, inner, _ = module.up_proj.shape
    up = _matmul(hidden[None], module.up_proj.transpose(1, 2), (experts, tokens, inner))
    return _matmul(torch.relu(up) ** 2, module.down_proj.transpose(1, 2), (experts, tokens, width))


def _biased(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """gpt-oss': `gate_up_proj` [E,H,2I], whose columns are gate, up, gate, up, .., and `down_proj` [E,I,H], both with a bias."""
    tokens, width = hidden.shape
    experts, _, doubled = module.gate_up_proj.shape
    both = _matmul(hidden[None], module.gate_up_proj, (experts, tokens, doubled)) + module.gate_up_proj_bias[:, None]
    inner = module._apply_gate(both)  # the model's own: it clamps
    return _matmul(inner, module.down_proj, (experts, tokens, width)) + module.down_proj_bias[:, None]


def _matmul(left: torch.Tensor, right: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """One MatMul, which broadcasts; torch's own would first write `left` once an expert."""
    return emit_operator("MatMul", left, right, shape=shape)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts)
