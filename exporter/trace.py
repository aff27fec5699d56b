"""One thin module per part of a decoder, traced to one ONNX graph: embedding, layer, head.

Graphs are standard ONNX (opset 24, with linear attention 27; IR 10) with dynamic batch B, new tokens S and KV slots C. Position
`p` of a row is KV slot `p`: no row holds padding, so `position_ids` alone says where keys are written and which slots a query may
see.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from transformers.modeling_outputs import MoEModelOutputWithPastAndCrossAttentions as Output

from skipdecode.bindings import PAST_CONV_STATE, PAST_RECURRENT_STATE, present
from skipdecode.exporter.architectures import DecoderParts, expands_latents
from skipdecode.exporter.attention import OPSET, ScatterCache
from skipdecode.exporter.linear_attention import LINEAR_OPSET, StateCache, as_operators
from skipdecode.manifest import LinearAttention

IR_VERSION = 10
_BATCH, _TOKENS, _SLOTS = 2, 3, 7  # example sizes; torch.export cannot keep a dimension of 0 or 1 dynamic


class _Embed(torch.nn.Module):  # type: ignore[misc]
    """input_ids [B,S] int64, position_ids [B,S] int64 -> hidden [B,S,H]."""

    def __init__(self, parts: DecoderParts) -> None:
        super().__init__()
        self.owner = parts.owner

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.owner(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return hidden


class _ComplexTurns:
    """Stands for DeepSeek-V2's rotary table, complex [B,S,D/2]: a layer adds an axis for its heads, which torch.onnx does not."""

    def __init__(self, turns: torch.Tensor) -> None:
        self.turns = torch.view_as_complex(torch.view_as_real(turns)[:, None])

    def to(self, *_: Any) -> _ComplexTurns:
        """The layer moves it to the query's device."""
        return self

    def unsqueeze(self, _: int) -> torch.Tensor:
        """Complex [B,1,S,D/2]."""
        return self.turns


class _Layer(torch.nn.Module):  # type: ignore[misc]
    """hidden [B,S,H], position_ids [B,S], past_key and past_value [B,KVH,C,D] -> hidden, present_key, present_value."""

    def __init__(
        self, layer: torch.nn.Module, rotary: torch.nn.Module | None, layer_type: str | None, window: int | None
    ) -> None:
        super().__init__()
        self.layer, self.rotary, self.layer_type, self.window = layer, rotary, layer_type, window
        self.latent = expands_latents(layer)

    def forward(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, past_key: torch.Tensor, past_value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cache = ScatterCache(past_key, past_value, position_ids[:, 0])
        slots = torch.arange(past_key.shape[2])
        visible = slots[None, None, :] <= position_ids[:, :, None]
        if self.window is not None:
            visible = visible & (slots[None, None, :] > position_ids[:, :, None] - self.window)
        arguments: dict[str, Any] = {"attention_mask": visible[:, None], "position_ids": position_ids, "use_cache": True}
        if self.rotary is not None:
            by_type = (self.layer_type,) if "layer_type" in inspect.signature(self.rotary.forward).parameters else ()
            turns = self.rotary(hidden, position_ids, *by_type)
            complex_turns = isinstance(turns, torch.Tensor) and turns.is_complex()
            arguments["position_embeddings"] = _ComplexTurns(turns) if complex_turns else turns
        names = inspect.signature(self.layer.forward).parameters
        arguments |= {name: None for name in ("alibi", "position_bias") if name in names}  # which their attention makes itself
        # of a latent, transformers' cache would get what keys and values are expanded from; the attention gets them
        arguments["kv_buffer" if self.latent else "layer_past" if "layer_past" in names else "past_key_values"] = cache
        out = self.layer(hidden, **arguments)
        if isinstance(out, tuple):  # and attention weights
            out = out[0]
        return out, cache.present_key, cache.present_value


class _LinearLayer(torch.nn.Module):  # type: ignore[misc]
    """hidden [B,S,H], past_conv_state [B,C,K-1], past_recurrent_state [B,VH,DK,DV] -> hidden, both states after its tokens."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, hidden: torch.Tensor, past_conv_state: torch.Tensor, past_recurrent_state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cache = StateCache(past_conv_state, past_recurrent_state)
        with as_operators(self.layer, cache):
            out = self.layer(hidden, position_embeddings=None, past_key_values=cache)
        return out, cache.conv_state, cache.recurrent_state


class _Head(torch.nn.Module):  # type: ignore[misc]
    """hidden [B,S,H], last [B] int64 (which position of each row) -> logits [B,V]."""

    def __init__(self, model: torch.nn.Module, owner: torch.nn.Module, final: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.final = torch.nn.ModuleList(final)
        self.model = model
        for body in (getattr(model, model.base_model_prefix), owner):  # OPT's head calls the owner, the others the base model
            body.forward = lambda _ids=None, inputs_embeds=None, **_: Output(last_hidden_state=inputs_embeds)

    def forward(self, hidden: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        index = last[:, None, None].expand(-1, 1, hidden.shape[2])
        hidden = torch.gather(hidden, 1, index)
        for module in self.final:
            hidden = module(hidden)
        logits: torch.Tensor = self.model(inputs_embeds=hidden, use_cache=False).logits
        return logits[:, 0]


def trace_embed(parts: DecoderParts) -> ir.Model:
    """The embedding's graph; `parts.owner` must have no layers left and identity final norms."""
    ids = torch.ones(_BATCH, _TOKENS, dtype=torch.int64)
    shapes = {"input_ids": {0: "B", 1: "S"}, "position_ids": {0: "B", 1: "S"}}
    return _export(_Embed(parts), (ids, ids.clone()), shapes, ["hidden"])


def trace_layer(
    layer: torch.nn.Module,
    rotary: torch.nn.Module | None,
    layer_type: str | None,
    window: int | None,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> ir.Model:
    """A layer's graph; `window`: tokens that a query sees, None: all; `sizes` are H, KVH and D."""
    hidden_size, kv_heads, head_size = sizes
    past = torch.zeros(_BATCH, kv_heads, _SLOTS, head_size, dtype=dtype)
    position_ids = torch.arange(_TOKENS)[None].repeat(_BATCH, 1)
    inputs = (torch.zeros(_BATCH, _TOKENS, hidden_size, dtype=dtype), position_ids, past, past.clone())
    shapes: dict[str, Any] = {
        "hidden": {0: "B", 1: "S"}, "position_ids": {0: "B", 1: "S"}, "past_key": {0: "B", 2: "C"}, "past_value": {0: "B", 2: "C"}
    }  # fmt: skip
    return _export(_Layer(layer, rotary, layer_type, window), inputs, shapes, ["hidden_out", "present_key", "present_value"])


def trace_linear_layer(layer: torch.nn.Module, hidden_size: int, states: LinearAttention, dtype: torch.dtype) -> ir.Model:
    """The graph of a layer with linear attention, whose operators are those of opset 27."""
    inputs = (
        torch.zeros(_BATCH, _TOKENS, hidden_size, dtype=dtype),
        torch.zeros(_BATCH, *states.conv_state, dtype=dtype),
        torch.zeros(_BATCH, *states.recurrent_state, dtype=dtype),
    )
    past = (PAST_CONV_STATE, PAST_RECURRENT_STATE)
    shapes = {"hidden": {0: "B", 1: "S"}, **{name: {0: "B"} for name in past}}
    model = _export(_LinearLayer(layer), inputs, shapes, ["hidden_out", *map(present, past)])
    model.opset_imports[""] = LINEAR_OPSET
    return model


def trace_head(
    model: torch.nn.Module, owner: torch.nn.Module, final: Sequence[torch.nn.Module], hidden_size: int, dtype: torch.dtype
) -> ir.Model:
    """The head's graph: final norm, projection to the vocabulary, and what the model does to its logits."""
    hidden = torch.zeros(_BATCH, _TOKENS, hidden_size, dtype=dtype)
    shapes = {"hidden": {0: "B", 1: "S"}, "last": {0: "B"}}
    return _export(_Head(model, owner, final), (hidden, torch.ones(_BATCH, dtype=torch.int64)), shapes, ["logits"])


def _export(module: torch.nn.Module, inputs: tuple[Any, ...], shapes: dict[str, Any], outputs: list[str]) -> ir.Model:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations, not the user's concern
        program = torch.onnx.export(
            module.eval(), inputs, dynamo=True, opset_version=OPSET, dynamic_shapes=shapes,
            input_names=list(shapes), output_names=outputs, optimize=False, verbose=False,
        )  # fmt: skip
    assert program is not None
    model: ir.Model = program.model
    model.ir_version = IR_VERSION
    return model
