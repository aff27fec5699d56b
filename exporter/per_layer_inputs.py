"""Per-layer inputs (Gemma 3n, Gemma 4's E2B and E4B): what each layer is told of each token beside the hidden state.

They depend on the token and its embedding alone, so they are made once, by the embedding's engine, and travel behind the hidden
state, or its N streams, from segment to segment: [B,S,N*H + L*P], of which layer l reads its P numbers and changes the first N*H.
So the runtime knows nothing of them, and a skipped layer's are not read.
"""

from __future__ import annotations

from typing import Any

import torch

from skipdecode.exporter.altup import spread, streams_width
from skipdecode.exporter.architectures import declared

TABLE = "embed_tokens_per_layer"  # [V,L*P], which the token looks up


def input_size(config: Any) -> int:
    """P, numbers of a token that each layer is told; 0: none."""
    return declared(config, "hidden_size_per_layer_input") or 0


def hidden_width(config: Any) -> int:
    """What goes between layers of each token: the hidden state and all layers' inputs."""
    width: int = streams_width(config) + config.num_hidden_layers * input_size(config)
    return width


def embedded(owner: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """input_ids [B,S] -> [B,S,N*H + L*P]."""
    hidden = owner.embed_tokens(input_ids)
    inputs = owner.project_per_layer_inputs(hidden, owner.get_per_layer_inputs(input_ids))
    return torch.cat((spread(owner, hidden), inputs.flatten(2)), dim=-1)


def own_input(inputs: torch.Tensor, size: int, layer: torch.Tensor) -> torch.Tensor:
    """Of all layers' inputs [B,S,L*P] those of one, [B,S,P]; layer [1] int64."""
    return inputs.unflatten(-1, (-1, size)).index_select(2, layer).squeeze(2)


def widen_embedding(owner: Any, config: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Give a model that was made with no layers what `embedded` takes of `config`'s; memory that nothing touches."""
    owner.config.num_hidden_layers = config.num_hidden_layers
    for name in (TABLE, "per_layer_model_projection"):
        module = getattr(owner, name)
        shape = next(shape for parameter, shape in shapes.items() if parameter.endswith(f".{name}.weight"))
        module.weight = torch.nn.Parameter(torch.empty(shape, dtype=module.weight.dtype), requires_grad=False)
