"""A mixture that does not go through transformers' interface for experts.

Llama 4's experts take each token times its score, and weigh alike; transformers gives every expert every token, times 0 where it
was not chosen. The function here stands for the mixture's `forward` while a layer is traced.
"""

from __future__ import annotations

from typing import Any

import torch

from skipdecode.exporter.experts import halved_experts


def llama_4_mixture(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B,S,H] -> rows [T,H] and the router's logits [T,E]; a token's one expert (`check_supported`) takes it times its score."""
    hidden = hidden_states.reshape(-1, self.hidden_dim)
    logits = torch.nn.functional.linear(hidden, self.router.weight)
    best, chosen = torch.topk(logits, 1, dim=-1)
    scaled = hidden * torch.sigmoid(best.float()).to(hidden.dtype)
    weights = torch.softmax(best, dim=-1)  # 1 of one, by which a lowering sees that the logits alone choose
    return self.shared_expert(hidden) + halved_experts(self.experts, scaled, chosen, weights), logits
