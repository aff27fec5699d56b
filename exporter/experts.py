"""Replaces transformers' mixtures of experts during a trace by a sum over every expert, times its weight or 0.

Standard ONNX has no operator that computes only the chosen experts; a target's lowering turns the sum into one (`lower_experts`).

Llama 4's mixture does not go through transformers' interface for experts. Its experts take the token times its score, and their
outputs are summed without weights; transformers feeds every token to every expert, times 0 where it was not chosen.
`llama_4_mixture` replaces its `forward`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from skipdecode.exporter.attention import emit_operator

EXPERTS_NAME = "skipdecode_onnx"


def _all_experts(module: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """hidden [T,H], the K of E experts `chosen` for each token [T,K] int64, and their weights [T,K] -> [T,H]."""
    if module.has_bias:
        experts = _gpt_oss_experts
    elif not module.has_gate:
        experts = _nemotron_h_experts
    else:
        experts = _turned_experts if module.is_transposed else _gated_experts
    return _weighted_sum(experts(module, hidden), hidden, chosen, weights)


def llama_4_mixture(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B,S,H] -> rows [T,H] and the router's logits [T,E]. A token's only expert (`check_supported`) takes it times its score."""
    hidden = hidden_states.reshape(-1, self.hidden_dim)
    logits = torch.nn.functional.linear(hidden, self.router.weight)
    best, chosen = torch.topk(logits, 1, dim=-1)
    scaled = hidden * torch.sigmoid(best.float()).to(hidden.dtype)
    weights = torch.softmax(best, dim=-1)  # always 1; shows `fuse_router` that only the logits choose
    return self.shared_expert(hidden) + _weighted_sum(_turned_experts(self.experts, scaled), scaled, chosen, weights), logits


def _weighted_sum(outputs: torch.Tensor, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum every expert's output [E,T,H], times its weight or 0, to [T,H]."""
    weights, experts = weights.to(hidden.dtype), outputs.shape[0]
    # a product: ONNX Runtime's CUDA provider leaves nodes that make zeros of a size known only at run time to the CPU
    zeros = torch.matmul(weights, torch.zeros(weights.shape[1], experts, dtype=hidden.dtype))
    token_weights = zeros.scatter(1, chosen, weights)
    weighed, axes = outputs * token_weights.T[:, :, None], torch.zeros(1, dtype=torch.int64)
    # emitted directly, since torch's sum of narrow floats would be traced with a cast to fp32 first
    return emit_operator("ReduceSum", weighed, axes, shape=hidden.shape, keepdims=0)


def _gated_experts(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Experts with a gate, [T,H] -> [E,T,H]: `gate_up_proj` [E,2I,H], gate rows before up rows, and `down_proj` [E,H,I]."""
    tokens, width = hidden.shape
    experts, doubled, _ = module.gate_up_proj.shape
    gate_and_up = _matmul(hidden[None], module.gate_up_proj.transpose(1, 2), (experts, tokens, doubled))
    gate, up = gate_and_up.split(doubled // 2, dim=-1)
    return _matmul(module.act_fn(gate) * up, module.down_proj.transpose(1, 2), (experts, tokens, width))


def _turned_experts(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Llama 4's and Aria's experts: `gate_up_proj` [E,H,2I], gate columns before up columns, and `down_proj` [E,I,H]."""
    tokens, width = hidden.shape
    experts, _, doubled = module.gate_up_proj.shape
    gate, up = _matmul(hidden[None], module.gate_up_proj, (experts, tokens, doubled)).split(doubled // 2, dim=-1)
    return _matmul(torch.nn.functional.silu(gate) * up, module.down_proj, (experts, tokens, width))


def _nemotron_h_experts(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Nemotron-H's experts, with a squared ReLU and no gate: `up_proj` [E,I,H] and `down_proj` [E,H,I]."""
    tokens, width = hidden.shape
    experts, inner, _ = module.up_proj.shape
    up = _matmul(hidden[None], module.up_proj.transpose(1, 2), (experts, tokens, inner))
    return _matmul(torch.relu(up) ** 2, module.down_proj.transpose(1, 2), (experts, tokens, width))


def _gpt_oss_experts(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """gpt-oss' experts: `gate_up_proj` [E,H,2I], columns gate, up, gate, up, .., and `down_proj` [E,I,H], both with a bias."""
    tokens, width = hidden.shape
    experts, _, doubled = module.gate_up_proj.shape
    gate_and_up = _matmul(hidden[None], module.gate_up_proj, (experts, tokens, doubled)) + module.gate_up_proj_bias[:, None]
    inner = module._apply_gate(gate_and_up)  # the model's own, which clamps
    return _matmul(inner, module.down_proj, (experts, tokens, width)) + module.down_proj_bias[:, None]


def _matmul(left: torch.Tensor, right: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """One MatMul that broadcasts; torch's own would first copy `left` once per expert."""
    return emit_operator("MatMul", left, right, shape=shape)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _all_experts)
