"""Builds a model's standard graphs (embedding, layers, head) with weights by the checkpoint's names.

Layers of one structure share a traced template.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import onnx_ir as ir
import torch
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from skipdecode.exporter.altup import StreamMean
from skipdecode.exporter.architectures import attention_window, decoder_parts, layer_kind
from skipdecode.exporter.config_json import allowing_empty_weights
from skipdecode.exporter.layout import Report
from skipdecode.exporter.own_attention import replace_forwards
from skipdecode.exporter.per_layer_inputs import input_size, widen_embedding
from skipdecode.exporter.rotary import freeze_rotary, rotary_base, rotary_for_base
from skipdecode.exporter.skeleton import Skeleton
from skipdecode.exporter.trace import LayerArrays, trace_embed, trace_head, trace_layer
from skipdecode.exporter.weights import WeightFile
from skipdecode.graph_passes.clean_trace import clean_trace
from skipdecode.graph_passes.conventions import is_parameter
from skipdecode.graph_passes.plan import Plan
from skipdecode.graph_passes.stitch import instantiate, stitch
from skipdecode.model import LayerGroup, layer_group


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardGraphs:
    """What every target is compiled from: standard ONNX with weights by reference."""

    embed: ir.Model
    layers: tuple[ir.Model, ...]
    head: ir.Model

    @property
    def weights(self) -> str:
        """The weights' dtype in a manifest's words."""
        return {ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}.get(self.embed.graph.outputs[0].dtype, "fp32")  # type: ignore[arg-type]

    @property
    def tied(self) -> str | None:
        """The matrix [V,E] that embedding and head share; None: each has its own."""
        head_weights = self.head.graph.initializers
        shared = [name for name, value in self.embed.graph.initializers.items() if name in head_weights and is_parameter(value)]
        return shared[0] if shared else None


def segment_graphs(graphs: StandardGraphs, plan: Plan, target: str, report: Report) -> Iterator[tuple[str, ir.Model]]:
    """Yield each segment's name and graph, reporting that it is about to be compiled for `target`."""
    for index, layers in enumerate(plan.segments):
        report(f"compiling segment {index + 1} of {len(plan.segments)} for {target}", index / len(plan.segments))
        name = f"segment_{index:03d}"
        yield name, stitch([graphs.layers[layer] for layer in layers], name=name)


def layer_graphs(skeleton: Skeleton, weights: WeightFile) -> list[ir.Model]:
    """One standard graph per layer; layers of the same structure are traced once."""
    templates: dict[Any, ir.Model] = {}
    graphs = []
    for index, layer in enumerate(skeleton.parts.layers):
        kind = layer_kind(skeleton.config, index)
        group = layer_group(skeleton.state_layers, skeleton.keys, index)
        base = rotary_base(skeleton.config, index)
        key = (kind, base, _structure(layer))
        if key not in templates:
            materialised = replace_forwards(_in_dtype(_materialise(layer, skeleton.config, index), skeleton.dtype))
            window = attention_window(skeleton.config, index)
            rotary = rotary_for_base(skeleton.config, skeleton.parts.rotary, base)
            templates[key] = trace_layer(materialised, rotary, kind, window, _layer_arrays(skeleton, group), skeleton.dtype)
            clean_trace(templates[key])
        prefix = f"{skeleton.parts.prefix}{index}."
        graph = instantiate(templates[key], index, group.keys_of, prefix)
        _link_weights(graph, skeleton, weights)
        graphs.append(graph)
    return graphs


def _layer_arrays(skeleton: Skeleton, group: LayerGroup) -> LayerArrays:
    source_keys = None if group.keys_of is None else layer_group(skeleton.state_layers, skeleton.keys, group.keys_of).keys
    return LayerArrays(hidden_size=skeleton.hidden_size, keys=group.keys, source_keys=source_keys, states=group.states)


def _materialise(layer: torch.nn.Module, config: Any, index: int) -> torch.nn.Module:
    """Build layer `index` of the skeleton again, with memory, and with the buffers that its model would add."""
    kind = {"layer_type": layer_kind(config, index)} if "layer_type" in inspect.signature(type(layer)).parameters else {}
    with allowing_empty_weights():  # there may be 0 shared experts
        materialised: torch.nn.Module = type(layer)(config, index, **kind)
    if config.model_type == "falcon_h1":
        from transformers.models.falcon_h1.modeling_falcon_h1 import compute_mup_vector

        materialised.mamba.register_buffer("mup_vector", compute_mup_vector(config), persistent=False)
    return materialised


def _in_dtype(layer: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The layer with its weights in `dtype`; the frequencies of a rotary embedding inside it stay fp32, as in transformers."""
    buffers = ((module, *buffer) for module in layer.modules() for buffer in module.named_buffers(recurse=False))
    wide = [(module, name, frequencies) for module, name, frequencies in buffers if name.endswith("inv_freq")]
    layer.to(dtype)
    for module, name, frequencies in wide:
        module.register_buffer(name, frequencies, persistent=False)
    return layer


def _structure(layer: torch.nn.Module) -> tuple[Any, ...]:
    """What a layer's graph depends on, apart from its weights: shapes, and the numbers and switches that its modules keep.

    Layers may differ only in these: GPT-2's may divide their scores by their depth, every fourth of SmolLM3's rotates nothing.
    """
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    settings = tuple(
        (path, type(module), name, value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, tuple))
        and name not in ("layer_idx", "layer_id")
        and not name.startswith("_")
    )
    return shapes, settings


def outer_graphs(skeleton: Skeleton, weights: WeightFile) -> tuple[ir.Model, ir.Model]:
    """The graphs of embedding and head, traced from a model without layers."""
    config = copy.deepcopy(skeleton.config)
    config.num_hidden_layers = 0
    kinds_setting = config.attribute_map.get("layer_types", "layer_types")
    if kinds_setting in {field.name for field in fields(config)} and getattr(config, kinds_setting) is not None:
        setattr(config, kinds_setting, [])
    # per-layer inputs of 0 layers are empty; ModernBERT divides by the number of layers when it draws random weights
    with allowing_empty_weights(), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=skeleton.dtype)
    model.tie_weights()
    parts = decoder_parts(model)
    if parts.rotary is not None:
        freeze_rotary(parts.rotary)
    names = {name: _path_of(model, getattr(parts.owner, name)) for name in parts.final_names}
    final = [getattr(parts.owner, name) for name in parts.final_names]
    final = [StreamMean(module) if isinstance(module, torch.nn.ModuleList) else module for module in final]
    for name in parts.final_names:
        setattr(parts.owner, name, torch.nn.Identity())
    owner_path = _path_of(model, parts.owner)
    if input_size(config):
        widen_embedding(parts.owner, skeleton.config, skeleton.shapes)
    replace_forwards(parts.owner)
    embed = trace_embed(parts, final)
    head = trace_head(model, parts.owner, final, skeleton.hidden_size, skeleton.dtype)
    for graph, title in ((embed, "embed"), (head, "head")):
        clean_trace(graph)
        graph.graph.name = title
        for value in list(graph.graph.initializers.values()):
            value.name = _model_name(str(value.name), owner_path, [names[name] for name in parts.final_names])
        _link_weights(graph, skeleton, weights)
    return embed, head


def _path_of(model: torch.nn.Module, module: torch.nn.Module) -> str:
    path: str = next(path for path, candidate in model.named_modules() if candidate is module)
    return path


def _model_name(name: str, owner: str, final: list[str]) -> str:
    """The model's name of a traced wrapper's parameter."""
    kind, _, rest = name.partition(".")
    if kind == "owner":
        return f"{owner}.{rest}"
    if kind == "final":
        index, _, parameter = rest.partition(".")
        return f"{final[int(index)]}.{parameter}"
    return rest if kind == "model" else name


def _link_weights(graph: ir.Model, skeleton: Skeleton, weights: WeightFile) -> None:
    """Point every parameter of `graph` into the weight file; buffers that no checkpoint stores stay inside the graph."""
    for value in list(graph.graph.initializers.values()):
        name = skeleton.canonical.get(str(value.name))
        if name is not None:
            value.name = name
            value.const_value = weights.external(name)
        elif is_parameter(value):
            assert value.const_value is not None and value.const_value.nbytes < 1 << 20, f"{value.name} is in no checkpoint"
