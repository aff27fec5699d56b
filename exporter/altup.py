"""AltUp (Alternating Updates, arXiv 2301.13310): Gemma 3n's layers have N streams per token where others have one hidden state.

transformers stores them as [N,B,S,H]. Here they are concatenated to [B,S,N*H], one wide hidden state between layers, so the
runtime knows nothing of them. `gemma_3n_layer` and `gemma_3n_mlp` replace the `forward` of a layer and of its MLP during a trace.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import torch

from skipdecode.exporter.architectures import declared_setting

_MIN_MEAN_SQUARE = 1e-5  # lower bound of the mean square that a stream is divided by


def streams_width(config: Any) -> int:
    """N*H, the numbers per token between layers; outside Gemma 3n the hidden state is the only stream."""
    width: int = config.hidden_size * (declared_setting(config, "altup_num_inputs") or 1)
    return width


def spread_to_streams(owner: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Embeddings [B,S,H] -> streams [B,S,N*H]: the embedding and its projections, rescaled to its root mean square."""
    others = (_rescaled_to(hidden, project(hidden)) for project in getattr(owner, "altup_projections", ()))
    return torch.cat((hidden, *others), dim=-1)


class StreamMean(torch.nn.ModuleList):  # type: ignore[misc]
    """The projections [H,H] of all streams but the first, as one module that averages streams [B,S,N*H] to [B,S,H]."""

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Project every other stream, rescale it to the first one's root mean square, and take the mean."""
        first, *others = streams.unflatten(-1, (len(self) + 1, -1)).unbind(2)
        rescaled = [_rescaled_to(first, project(stream)) for project, stream in zip(self, others, strict=True)]
        return torch.stack((first, *rescaled)).mean(dim=0)


def _rescaled_to(target: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rescale `rows` [..,H] to the root mean square of those of `target`; squares are averaged in fp32."""
    target_mean_square, mean_square = (each.float().square().mean(dim=-1, keepdim=True) for each in (target, rows))
    return (rows * target_mean_square.sqrt() / mean_square.clamp(min=_MIN_MEAN_SQUARE).sqrt()).to(rows.dtype)


def gemma_3n_layer(
    self: Any, hidden_states: torch.Tensor, per_layer_input: torch.Tensor, shared_kv_states: Any, **attention_arguments: Any
) -> torch.Tensor:
    """Streams [B,S,N*H] -> [B,S,N*H]: predict all streams, run the layer on the active one, and correct all by its change."""
    altup, active, count = self.altup, self.config.altup_active_idx, self.config.altup_num_inputs
    streams = hidden_states.unflatten(-1, (count, -1))
    mixing = altup.prediction_coefs(altup.compute_router_modalities(streams[:, :, active]))
    predicted = streams + torch.matmul(mixing.unflatten(-1, (count, count)), streams)
    before = predicted[:, :, active]
    after = _attention_and_mlp(self, before, shared_kv_states=shared_kv_states, **attention_arguments)
    coefficients = altup.correction_coefs(altup.compute_router_modalities(after)) + 1.0
    corrected = predicted + (after - before)[:, :, None] * coefficients[..., None]
    active_output = corrected[:, :, active]
    if self.config.altup_correct_scale:
        active_output = altup.scale_corrected_output(active_output)
    projected_input = self.per_layer_projection(self.act_fn(self.per_layer_input_gate(active_output)) * per_layer_input)
    projected_input = self.post_per_layer_input_norm(projected_input)
    return torch.cat((corrected[:, :, :1], corrected[:, :, 1:] + projected_input[:, :, None]), dim=2).flatten(2)


def _attention_and_mlp(self: Any, hidden: torch.Tensor, **attention_arguments: Any) -> torch.Tensor:
    """The layer's attention and MLP on one stream [B,S,H], with a low-rank product (LAuReL) added to the attention."""
    normed = self.input_layernorm(hidden)
    attended, _ = self.self_attn(hidden_states=normed, **attention_arguments)
    hidden = (hidden + self.post_attention_layernorm(attended) + self.laurel(normed)) / math.sqrt(2)
    return hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))


def gemma_3n_mlp(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """[B,S,H] -> [B,S,H]. Some layers keep only the part of the gate above a bound.

    The bound would zero a fraction `activation_sparsity` of normally distributed numbers.
    """
    gate = self.gate_proj(hidden_states)
    if self.activation_sparsity > 0:
        wide = gate.float()
        mean = wide.mean(dim=-1, keepdim=True)
        deviation = (wide - mean).square().mean(dim=-1, keepdim=True).sqrt()
        bound = mean + deviation * NormalDist().inv_cdf(self.activation_sparsity)
        gate = torch.relu(wide - bound).to(gate.dtype)
    rows: torch.Tensor = self.down_proj(self.act_fn(gate) * self.up_proj(hidden_states))
    return rows
