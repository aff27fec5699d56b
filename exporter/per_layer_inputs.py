"""Per-layer inputs (Gemma 3n, Gemma 4's E2B and E4B): P numbers per token that each layer reads in addition to the hidden state.

They depend only on the token and its embedding, so the embedding's engine computes them once, for all layers. They travel from
segment to segment behind the hidden state (or its N streams) as [B,S,N*H + L*P]: layer l reads its P numbers and changes the
first N*H. So the runtime need not know about them, and those of skipped layers are not read.
"""

from __future__ import annotations

from typing import Any

import torch

from skipdecode.exporter.altup import spread_to_streams, streams_width
from skipdecode.exporter.architectures import declared_setting

TABLE = "embed_tokens_per_layer"  # [V,L*P], indexed by token


def input_size(config: Any) -> int:
    """P, the numbers per token that each layer reads; 0: the model has no per-layer inputs."""
    return declared_setting(config, "hidden_size_per_layer_input") or 0


def hidden_width(config: Any) -> int:
    """N*H + L*P, the numbers per token between layers: the hidden state and all layers' inputs."""
    width: int = streams_width(config) + config.num_hidden_layers * input_size(config)
    return width


def embed(owner: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """input_ids [B,S] -> [B,S,N*H + L*P]."""
    hidden = owner.embed_tokens(input_ids)
    inputs = owner.project_per_layer_inputs(hidden, owner.get_per_layer_inputs(input_ids))
    return torch.cat((spread_to_streams(owner, hidden), inputs.flatten(2)), dim=-1)


def input_of_layer(inputs: torch.Tensor, size: int, layer: torch.Tensor) -> torch.Tensor:
    """All layers' inputs [B,S,L*P], layer [1] int64 -> that layer's [B,S,P]."""
    return inputs.unflatten(-1, (-1, size)).index_select(2, layer).squeeze(2)


def widen_embedding(owner: Any, config: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Give a model built without layers the parameters that `embed` reads, uninitialised, sized for `config`'s layers."""
    owner.config.num_hidden_layers = config.num_hidden_layers
    for name in (TABLE, "per_layer_model_projection"):
        module = getattr(owner, name)
        shape = next(shape for parameter, shape in shapes.items() if parameter.endswith(f".{name}.weight"))
        module.weight = torch.nn.Parameter(torch.empty(shape, dtype=module.weight.dtype), requires_grad=False)
