"""AltUp (Alternating Updates, arXiv 2301.13310): Gemma 3n's layers have N streams of a token where others have a hidden state.

transformers has them as [N,B,S,H]. Here they lie one behind the other, [B,S,N*H], which between layers is one wide hidden state:
the runtime knows nothing of them. The functions here stand for the `forward` of a layer and of its MLP while it is traced.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import torch

from skipdecode.exporter.architectures import declared

_LEAST_SQUARE = 1e-5  # of a stream whose length becomes another's


def streams_width(config: Any) -> int:
    """N*H, numbers of a token between layers; elsewhere the hidden state is the only stream."""
    width: int = config.hidden_size * (declared(config, "altup_num_inputs") or 1)
    return width


def spread(owner: Any, hidden: torch.Tensor) -> torch.Tensor:
    """A token's embedding [B,S,H] and projections of it that are as long: [B,S,N*H]."""
    others = (_as_long_as(hidden, project(hidden)) for project in getattr(owner, "altup_projections", ()))
    return torch.cat((hidden, *others), dim=-1)


class Merged(torch.nn.ModuleList):  # type: ignore[misc]
    """The projections [H,H] of all streams but the first, as one module: streams [B,S,N*H] -> their mean [B,S,H]."""

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Each is as long as the first one, once it is projected."""
        first, *others = streams.unflatten(-1, (len(self) + 1, -1)).unbind(2)
        projected = [_as_long_as(first, project(stream)) for project, stream in zip(self, others, strict=True)]
        return torch.stack((first, *projected)).mean(dim=0)


def _as_long_as(wanted: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows [..,H], as long as those of `wanted`; squares are summed in fp32."""
    square, own = (each.float().square().mean(dim=-1, keepdim=True) for each in (wanted, rows))
    return (rows * square.sqrt() / own.clamp(min=_LEAST_SQUARE).sqrt()).to(rows.dtype)


def gemma_3n_layer(
    self: Any, hidden_states: torch.Tensor, per_layer_input: torch.Tensor, shared_kv_states: Any, **of_attention: Any
) -> torch.Tensor:
    """Streams [B,S,N*H] -> the same: all are predicted, one is computed, and all are corrected by what that became."""
    altup, active, count = self.altup, self.config.altup_active_idx, self.config.altup_num_inputs
    streams = hidden_states.unflatten(-1, (count, -1))
    mixing = altup.prediction_coefs(altup.compute_router_modalities(streams[:, :, active]))
    predicted = streams + torch.matmul(mixing.unflatten(-1, (count, count)), streams)
    before = predicted[:, :, active]
    after = _computed(self, before, shared_kv_states=shared_kv_states, **of_attention)
    shares = altup.correction_coefs(altup.compute_router_modalities(after)) + 1.0
    corrected = predicted + (after - before)[:, :, None] * shares[..., None]
    chosen = corrected[:, :, active]
    if self.config.altup_correct_scale:
        chosen = altup.scale_corrected_output(chosen)
    told = self.per_layer_projection(self.act_fn(self.per_layer_input_gate(chosen)) * per_layer_input)
    told = self.post_per_layer_input_norm(told)
    return torch.cat((corrected[:, :, :1], corrected[:, :, 1:] + told[:, :, None]), dim=2).flatten(2)


def _computed(self: Any, hidden: torch.Tensor, **of_attention: Any) -> torch.Tensor:
    """What the layer makes of one stream [B,S,H]: attention and MLP, and a product of low rank beside them."""
    normed = self.input_layernorm(hidden)
    attended, _ = self.self_attn(hidden_states=normed, **of_attention)
    hidden = (hidden + self.post_attention_layernorm(attended) + self.laurel(normed)) / math.sqrt(2)
    return hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))


def gemma_3n_mlp(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """[B,S,H] -> the same. Some layers keep what a gate has above a bound: of normal numbers the part that is asked for."""
    gate = self.gate_proj(hidden_states)
    if self.activation_sparsity > 0:
        wide = gate.float()
        mean = wide.mean(dim=-1, keepdim=True)
        deviation = (wide - mean).square().mean(dim=-1, keepdim=True).sqrt()
        bound = mean + deviation * NormalDist().inv_cdf(self.activation_sparsity)
        gate = torch.relu(wide - bound).to(gate.dtype)
    rows: torch.Tensor = self.down_proj(self.act_fn(gate) * self.up_proj(hidden_states))
    return rows
