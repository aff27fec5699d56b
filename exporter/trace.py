"""Trace each part of a decoder, wrapped in a thin module, to one ONNX graph: embedding, layer, head.

Graphs are standard ONNX (opset 24; 27 for layers that keep states; IR 10) with dynamic batch B, new tokens S and KV slots C.
Position `p` of a row is KV slot `p`. No row holds padding, so `position_ids` is all that says where keys are written and which
slots a query may see.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from transformers.modeling_outputs import MoEModelOutputWithPastAndCrossAttentions as Output

from skipdecode.bindings import (
    HIDDEN,
    HIDDEN_OUT,
    INPUT_IDS,
    LAST,
    LOGITS,
    PAST,
    PAST_KEY,
    PAST_VALUE,
    POSITION_IDS,
    past,
    present,
)
from skipdecode.exporter import per_layer_inputs
from skipdecode.exporter.altup import streams_width
from skipdecode.exporter.architectures import (
    NORM_ON_BOTH_ENDS,
    DecoderParts,
    base_name,
    expands_latents,
    has_narrow_values,
)
from skipdecode.exporter.attention import ScatterCache
from skipdecode.exporter.state_layers import CONV_STATE, LINEAR_OPSET, RECURRENT_STATE, StateCache, emitting_operators
from skipdecode.graph_passes.conventions import OPSET
from skipdecode.graph_passes.stitch import LAYER_INDEX
from skipdecode.model import KeyValueSizes, State

IR_VERSION = 10
_BATCH, _TOKENS, _SLOTS = 2, 3, 7  # example sizes; torch.export cannot keep a dimension of 0 or 1 dynamic


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerArrays:
    """Sizes of the arrays that a layer takes in addition to its weights."""

    hidden_size: int  # H
    keys: KeyValueSizes | None  # of its own keys and values; None: it has none
    source_keys: KeyValueSizes | None  # of another layer's keys and values, which it reads; None: it reads its own
    states: tuple[State, ...]


class _Embed(torch.nn.Module):  # type: ignore[misc]
    """input_ids [B,S] int64, position_ids [B,S] int64 -> hidden [B,S,H]."""

    def __init__(self, parts: DecoderParts, final: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.owner = parts.owner
        self.norms = torch.nn.ModuleList(final if parts.owner.config.model_type in NORM_ON_BOTH_ENDS else [])

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if per_layer_inputs.input_size(self.owner.config):
            return per_layer_inputs.embed(self.owner, input_ids)
        hidden: torch.Tensor = self.owner(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        for norm in self.norms:
            hidden = norm(hidden)
        return hidden


class _ComplexRotations:
    """Stands for DeepSeek-V2's rotary table, complex [B,S,D/2]: torch.onnx cannot trace how layers add an axis for heads."""

    def __init__(self, rotations: torch.Tensor) -> None:
        self.rotations = torch.view_as_complex(torch.view_as_real(rotations)[:, None])

    def to(self, *_: Any) -> _ComplexRotations:
        """Called by the layer to move the table to the query's device."""
        return self

    def unsqueeze(self, _: int) -> torch.Tensor:
        """Complex [B,1,S,D/2]."""
        return self.rotations


class _Layer(torch.nn.Module):  # type: ignore[misc]
    """hidden [B,S,H], position_ids [B,S], past_key and past_value [B,KVH,C,D], past states [B,...]
    -> hidden and the present version of every past array.

    `present_key` and `present_value` are those of another layer, which this one reads. `layer_index` [1] int64 is the layer's
    number, given if it has per-layer inputs. Arrays that the layer neither keeps nor reads are None.
    """

    def __init__(
        self, layer: torch.nn.Module, rotary: torch.nn.Module | None, layer_type: str | None, window: int | None
    ) -> None:
        super().__init__()
        self.layer, self.rotary, self.layer_type, self.window = layer, rotary, layer_type, window
        self.fills_buffer_late = expands_latents(layer) or has_narrow_values(layer)
        self.input_size = getattr(layer, "hidden_size_per_layer_input", 0)  # P
        self.width = streams_width(layer.config) if self.input_size else 0

    def forward(
        self,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        past_key: torch.Tensor | None = None,
        past_value: torch.Tensor | None = None,
        past_conv_state: torch.Tensor | None = None,
        past_recurrent_state: torch.Tensor | None = None,
        present_key: torch.Tensor | None = None,
        present_value: torch.Tensor | None = None,
        layer_index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        pasts = {CONV_STATE: past_conv_state, RECURRENT_STATE: past_recurrent_state}
        states = {name: state for name, state in pasts.items() if state is not None}
        attention, arguments = None, dict[str, Any](position_embeddings=None, use_cache=True)
        if past_key is not None and past_value is not None:
            attention = ScatterCache(past_key, past_value, position_ids)
        key = past_key if past_key is not None else present_key
        parameters = inspect.signature(self.layer.forward).parameters
        if key is not None:
            arguments |= self._attention_arguments(hidden, position_ids, key.shape[2])
        else:  # RecurrentGemma's layers ask for both
            others = {"attention_mask": None, "position_ids": position_ids}
            arguments |= {name: value for name, value in others.items() if name in parameters}
        layer_inputs = None
        if layer_index is not None:
            hidden, layer_inputs = hidden.split((self.width, hidden.shape[2] - self.width), dim=-1)
            arguments["per_layer_input"] = per_layer_inputs.input_of_layer(layer_inputs, self.input_size, layer_index)
        cache = StateCache(states, attention) if states else attention
        arguments |= {name: None for name in ("alibi", "position_bias") if name in parameters}  # made in `own_attention`
        if "shared_kv_states" in parameters:
            arguments["shared_kv_states"] = {self.layer_type: (present_key, present_value)}
        arguments[self._cache_argument(parameters)] = cache
        with emitting_operators(self.layer, cache) if isinstance(cache, StateCache) else nullcontext():
            out = self.layer(hidden, **arguments)
        if isinstance(out, tuple):  # the hidden state, attention weights
            out = out[0]
        if layer_inputs is not None:
            out = torch.cat((out, layer_inputs), dim=-1)
        return out, *((attention.present_key, attention.present_value) if attention else ()), *states.values()

    def _cache_argument(self, parameters: Mapping[str, object]) -> str:
        """The name of the layer's argument that takes its cache."""
        if self.fills_buffer_late:
            # a cache would get the latent, or values narrower than its slots; this argument reaches `onnx_attention`, which is
            # given keys and values as attention reads them
            return "kv_buffer"
        return "layer_past" if "layer_past" in parameters else "cache"

    def _attention_arguments(self, hidden: torch.Tensor, position_ids: torch.Tensor, slots: int) -> dict[str, Any]:
        """The arguments of a layer with attention: mask, positions, rotary embeddings."""
        slot_indices = torch.arange(slots)
        visible = slot_indices[None, None, :] <= position_ids[:, :, None]
        if self.window is not None:
            visible = visible & (slot_indices[None, None, :] > position_ids[:, :, None] - self.window)
        arguments: dict[str, Any] = {"attention_mask": visible[:, None], "position_ids": position_ids}
        if self.rotary is not None:
            by_type = (self.layer_type,) if "layer_type" in inspect.signature(self.rotary.forward).parameters else ()
            rotations = self.rotary(hidden, position_ids, *by_type)
            is_complex = isinstance(rotations, torch.Tensor) and rotations.is_complex()
            arguments["position_embeddings"] = _ComplexRotations(rotations) if is_complex else rotations
        return arguments


class _Head(torch.nn.Module):  # type: ignore[misc]
    """hidden [B,S,H], last [B] int64 (which position of each row) -> logits [B,V]."""

    def __init__(self, model: torch.nn.Module, owner: torch.nn.Module, final: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.final = torch.nn.ModuleList(final)
        self.model = model
        for body in (getattr(model, base_name(model)), owner):  # OPT's head calls the owner, the others the base model
            body.forward = _pass_through

    def forward(self, hidden: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        # drops the per-layer inputs that follow the hidden state
        index = last[:, None, None].expand(-1, 1, streams_width(self.model.config))
        hidden = torch.gather(hidden, 1, index)
        for module in self.final:
            hidden = module(hidden)
        logits: torch.Tensor = self.model(inputs_embeds=hidden, use_cache=False).logits
        return logits[:, 0]


def _pass_through(_ids: object = None, inputs_embeds: torch.Tensor | None = None, **_: object) -> Output:
    """The `forward` of a body without layers and norms: returns its input."""
    out = Output(last_hidden_state=inputs_embeds)
    out.shared_kv_states = None  # Gemma 4's head passes it on
    return out


def trace_embed(parts: DecoderParts, final: Sequence[torch.nn.Module]) -> ir.Model:
    """The embedding's graph; `parts.owner` must have no layers left, and identities in place of the `final` norms."""
    inputs = {name: torch.ones(_BATCH, _TOKENS, dtype=torch.int64) for name in (INPUT_IDS, POSITION_IDS)}
    return _export(_Embed(parts, final), inputs, {name: {0: "B", 1: "S"} for name in inputs}, [HIDDEN])


def trace_layer(
    layer: torch.nn.Module,
    rotary: torch.nn.Module | None,
    layer_type: str | None,
    window: int | None,
    arrays: LayerArrays,
    dtype: torch.dtype,
) -> ir.Model:
    """A layer's graph.

    Args:
        rotary: the model's module of rotary embeddings, if it has one.
        layer_type: the layer's kind, for a `rotary` that tells kinds apart and for reading another layer's keys and values.
        window: tokens that a query sees; None: all.
        arrays: sizes of what the layer reads and keeps.
        dtype: of its weights, the hidden states, and everything that it keeps.
    """
    inputs = {
        HIDDEN: torch.zeros(_BATCH, _TOKENS, arrays.hidden_size, dtype=dtype),
        POSITION_IDS: torch.arange(_TOKENS)[None].repeat(_BATCH, 1),
    }
    shapes: dict[str, Any] = {name: {0: "B", 1: "S"} for name in inputs}
    own_keys = {name: arrays.keys for name in (PAST_KEY, PAST_VALUE) if arrays.keys}
    read_keys = {present(name): arrays.source_keys for name in (PAST_KEY, PAST_VALUE) if arrays.source_keys}
    for name, keys in (own_keys | read_keys).items():
        inputs[name] = torch.zeros(_BATCH, keys.num_heads, _SLOTS, keys.head_size, dtype=dtype)
        shapes[name] = {0: "B", 2: "C"}
    for state in arrays.states:
        inputs[past(state.name)] = torch.zeros(_BATCH, *state.shape, dtype=dtype)
        shapes[past(state.name)] = {0: "B"}
    module = _Layer(layer, rotary, layer_type, window)
    if module.input_size:
        inputs[LAYER_INDEX], shapes[LAYER_INDEX] = torch.zeros(1, dtype=torch.int64), None
    outputs = [HIDDEN_OUT, *(present(name) for name in inputs if name.startswith(PAST))]
    model = _export(module, inputs, shapes, outputs)
    if arrays.states:
        model.opset_imports[""] = LINEAR_OPSET
    return model


def trace_head(
    model: torch.nn.Module, owner: torch.nn.Module, final: Sequence[torch.nn.Module], hidden_size: int, dtype: torch.dtype
) -> ir.Model:
    """The head's graph: final norms, projection to the vocabulary, and whatever the model does to its logits.

    `owner` is the module that holds the layers, `DecoderParts.owner`. Its `forward` and that of the base model are replaced for
    good, so the caller's `model` cannot run its layers afterwards.
    """
    hidden, last = torch.zeros(_BATCH, _TOKENS, hidden_size, dtype=dtype), torch.ones(_BATCH, dtype=torch.int64)
    shapes = {HIDDEN: {0: "B", 1: "S"}, LAST: {0: "B"}}
    return _export(_Head(model, owner, final), {HIDDEN: hidden, LAST: last}, shapes, [LOGITS])


def _export(
    module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], shapes: Mapping[str, Any], outputs: list[str]
) -> ir.Model:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations, not the user's concern
        program = torch.onnx.export(
            module.eval(), (), kwargs=dict(inputs), dynamo=True, opset_version=OPSET, dynamic_shapes=dict(shapes),
            input_names=list(inputs), output_names=outputs, optimize=False, verbose=False,
        )  # fmt: skip
    assert program is not None
    model: ir.Model = program.model
    model.ir_version = IR_VERSION
    return model
