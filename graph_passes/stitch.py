"""Instantiate a template for a layer, and stitch graphs into one: layers into a segment, everything into a whole variant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from skipdecode import bindings
from skipdecode.graph_passes.conventions import inputs_by_name, is_parameter

LAYER_INDEX = "layer_index"  # a template's input, [1] int64, which becomes a constant
_SHARED_INPUTS = {bindings.HIDDEN, bindings.POSITION_IDS, bindings.SEQLENS_K, bindings.TOTAL_SEQUENCE_LENGTH}


def instantiate(template: ir.Model, layer: int, keys_of: int | None, prefix: str) -> ir.Model:
    """Copy a traced layer as layer `layer`: KV names get its number, parameters the checkpoint's names.

    Args:
        keys_of: the layer whose keys and values it reads, if it reads another layer's.
        prefix: replaces `layer.` at the start of the template's parameter names.
    """
    model = template.clone()
    for value in [*model.graph.inputs, *model.graph.outputs]:
        if value.name not in (*_SHARED_INPUTS, bindings.HIDDEN_OUT, LAYER_INDEX):
            of_other_layer = str(value.name).startswith(bindings.PRESENT) and value.is_graph_input()
            value.name = bindings.of_layer(str(value.name), keys_of if of_other_layer and keys_of is not None else layer)
    for value in list(model.graph.initializers.values()):
        if is_parameter(value) and str(value.name).startswith("layer."):
            value.name = prefix + str(value.name).removeprefix("layer.")
    _bind_layer_index(model.graph, layer)
    model.graph.name = f"layer_{layer:03d}"
    return model


def _bind_layer_index(graph: ir.Graph, layer: int) -> None:
    index_input = inputs_by_name(graph).get(LAYER_INDEX)
    if index_input is not None:
        graph.inputs.remove(index_input)
        index_input.const_value = ir.tensor(np.array([layer], dtype=np.int64), name=LAYER_INDEX)
        graph.register_initializer(index_input)


def stitch(models: Sequence[ir.Model], *, name: str) -> ir.Model:
    """Join graphs into one, feeding each graph's hidden state to the next; inputs of the same name become one.

    An input named like an output of an earlier graph (keys and values that a layer reads of another) becomes that output.

    Inputs, outputs and parameters keep their names; nodes and all other values get their graph's name as a prefix. Weights of the
    same name (a tied embedding and head) become one initializer. Other initializers of the same name do so only if they are equal
    (layers may have different rotary frequencies).
    """
    graph = ir.Graph([], [], nodes=[], name=name, opset_imports={})
    inputs: dict[str, ir.Value] = {}
    hidden: ir.Value | None = None
    for part in models:
        model = part.clone()
        _claim_names(model)
        for domain, version in model.graph.opset_imports.items():
            graph.opset_imports[domain] = max(version, graph.opset_imports.get(domain, 0))
        _merge_inputs(graph, model.graph, inputs, hidden)
        _merge_initializers(graph, model.graph)
        nodes, outputs = list(model.graph), list(model.graph.outputs)
        model.graph.outputs.clear()
        model.graph.remove(nodes)
        graph.extend(nodes)
        hidden = next((v for v in outputs if v.name in (bindings.HIDDEN, bindings.HIDDEN_OUT)), None)
        graph.outputs.extend(value for value in outputs if value is not hidden)
        if hidden is not None and part is not models[-1]:
            hidden.name = f"{model.graph.name}.{bindings.HIDDEN_OUT}"
    if hidden is not None:
        graph.outputs.insert(0, hidden)
    return ir.Model(graph, ir_version=models[0].ir_version, producer_name="skipdecode")


def _claim_names(model: ir.Model) -> None:
    """Prefix all nodes, intermediate values and constants with the graph's name, so that graphs can be joined."""
    graph = model.graph
    kept = {value.name for value in [*graph.inputs, *graph.outputs]}
    for node in graph:
        node.name = f"{graph.name}.{node.name or node.op_type}"
        for value in node.outputs:
            if value.name and value.name not in kept:  # an omitted output has no name
                value.name = f"{graph.name}.{value.name}"
    for value in list(graph.initializers.values()):
        if not is_parameter(value):
            value.name = f"{graph.name}.{value.name}"


def _merge_inputs(graph: ir.Graph, part: ir.Graph, inputs: dict[str, ir.Value], hidden: ir.Value | None) -> None:
    written = {value.name: value for value in graph.outputs}
    new = []
    for value in part.inputs:
        name = str(value.name)
        known = hidden if name == bindings.HIDDEN and hidden is not None else inputs.get(name) or written.get(name)
        if known is None:
            new.append(value)
        else:
            ir.convenience.replace_all_uses_with(value, known, replace_graph_outputs=True)
    part.inputs.clear()
    for value in new:
        inputs[str(value.name)] = value
        graph.inputs.append(value)


def _merge_initializers(graph: ir.Graph, part: ir.Graph) -> None:
    for name, value in list(part.initializers.items()):
        del part.initializers[name]
        known = graph.initializers.get(name)
        if known is not None and _is_same_tensor(known, value):
            ir.convenience.replace_all_uses_with(value, known)
            continue
        if known is not None:
            value.name = f"{part.name}.{name}"
        graph.register_initializer(value)


def _is_same_tensor(one: ir.Value, other: ir.Value) -> bool:
    """Whether two initializers of the same name are the same tensor; the checkpoint's weights (external) are, by their name."""
    first, second = one.const_value, other.const_value
    if first is None or second is None or isinstance(first, ir.ExternalTensor):
        return True
    return first.shape == second.shape and bool(np.array_equal(first.numpy(), second.numpy()))
