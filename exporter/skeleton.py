"""A model without its weights: the names, shapes and ties of its tensors, and the parts it is taken apart into."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from skipdecode.exporter.architectures import INDEXED, OWN_ATTENTION, STATE_ONLY, DecoderParts, decoder_parts, layer_keys
from skipdecode.exporter.attention import ATTENTION_NAME
from skipdecode.exporter.config_json import blaming_config, config_origin
from skipdecode.exporter.experts import EXPERTS_NAME
from skipdecode.exporter.per_layer_inputs import hidden_width
from skipdecode.exporter.state_layers import state_layers
from skipdecode.model import KeyValueSizes, LayerGroup, layer_group

_CAUSAL_MASKS = r"(attn|attention)\.(masked_)?bias$"  # in old checkpoints of GPT-2 and its relatives


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A model without its weights."""

    config: Any
    dtype: torch.dtype  # of weights and activations
    parts: DecoderParts  # of the model, on the meta device
    shapes: dict[str, tuple[int, ...]]  # every parameter (tied ones once) and every buffer that checkpoints store
    canonical: dict[str, str]  # parameter or buffer -> the name under which it is stored
    ignored: tuple[str, ...]  # patterns of further tensors in checkpoints that have no effect
    hidden_size: int  # numbers per token between layers
    keys: KeyValueSizes  # of layer 0's keys and values
    state_layers: tuple[LayerGroup, ...]
    vocab_size: int  # V, the width of the logits

    @property
    def num_parameters(self) -> int:
        """The number of elements in `shapes`."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def ignores(self, name: str) -> bool:
        """Whether a tensor of a checkpoint may be left unread without a warning."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    @property
    def first_layer_keeping_nothing(self) -> int:
        """The first layer from which on none keeps keys, values or states; such layers compute only a prompt's last token."""
        groups = [layer_group(self.state_layers, self.keys, layer) for layer in range(len(self.parts.layers))]
        return max((layer + 1 for layer, group in enumerate(groups) if group.keeps_anything), default=0)

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """The number of elements in `shapes` of each layer."""
        sizes = [0] * len(self.parts.layers)
        for name, shape in self.shapes.items():
            if name.startswith(self.parts.prefix):
                sizes[int(name[len(self.parts.prefix) :].split(".")[0])] += math.prod(shape)
        return tuple(sizes)


def meta_model(config: Any, dtype: torch.dtype) -> Any:
    """transformers' model on the meta device: all of it but memory.

    Raises:
        ModelNotSupportedError: transformers cannot build a model of this configuration.
    """
    with torch.device("meta"), blaming_config(config_origin(config)):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def build_skeleton(config: Any, dtype: torch.dtype = torch.float32) -> Skeleton:
    """A model's names, shapes and ties.

    Raises:
        ModelNotSupportedError: transformers cannot build a model of this configuration.
    """
    config._attn_implementation = "eager" if config.model_type in OWN_ATTENTION else ATTENTION_NAME
    config._experts_implementation = EXPERTS_NAME
    if config.model_type in STATE_ONLY:
        config.residual_in_fp32 = False  # hidden states between engines have the engines' dtype
    if config.model_type == "glm_moe_dsa":
        config.indexer_types = ["full"] * config.num_hidden_layers  # "shared" layers would reuse the tokens chosen by one below
    model = meta_model(config, dtype)
    first_names: dict[int, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    empty = [re.escape(name) for name, p in parameters.items() if not p.numel()]  # which not all checkpoints hold
    unread = [INDEXED[config.model_type]] if config.model_type in INDEXED else []
    used = {name: p for name, p in parameters.items() if p.numel() and not any(re.search(pattern, name) for pattern in unread)}
    canonical = {name: first_names.setdefault(id(p), name) for name, p in used.items()}
    stored = model.state_dict().keys()  # Apertus stores two numbers of its activation as buffers
    buffers = {name: tuple(b.shape) for name, b in model.named_buffers() if name in stored and b.is_floating_point()}
    parts = decoder_parts(model)
    return Skeleton(
        config=config,
        dtype=dtype,
        parts=parts,
        shapes={name: tuple(p.shape) for name, p in model.named_parameters() if name in canonical} | buffers,
        canonical=canonical | {name: name for name in buffers},
        ignored=(
            *(model._keys_to_ignore_on_load_unexpected or ()),
            _CAUSAL_MASKS,
            *_multi_token_patterns(config),
            *empty,
            *unread,
        ),
        hidden_size=hidden_width(config),
        keys=layer_keys(config, 0),
        state_layers=state_layers(config, parts.layers),
        vocab_size=model.get_output_embeddings().weight.shape[0],
    )


def _multi_token_patterns(config: Any) -> list[str]:
    """Patterns of layers after the last that predict the token after the next; transformers has them for some models only."""
    first = config.num_hidden_layers
    return [rf"layers\.{first + more}\." for more in range(getattr(config, "num_nextn_predict_layers", None) or 0)]
