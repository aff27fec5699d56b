"""Layers joined to one graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from skipdecode.graph_passes.stitch import instantiate, stitch


def _template() -> ir.Model:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 24]>
        layer (float[B,S,4] hidden, float[B,1,C,4] past_key, float[4] weight)
            => (float[B,S,4] hidden_out, float[B,1,C,4] present_key)
        <float half = {0.5}> {
            scaled = Mul (hidden, weight)
            hidden_out = Mul (scaled, half)
            present_key = Identity (past_key)
        }"""
    )
    value = model.graph.inputs.pop()
    value.name, value.const_value = "layer.fc.weight", ir.tensor(np.ones(4, np.float32), name="layer.fc.weight")
    model.graph.register_initializer(value)
    return model


def _layers(count: int) -> list[ir.Model]:
    template = _template()
    return [instantiate(template, i, lambda name, i=i: name.replace("layer.", f"model.layers.{i}.")) for i in range(count)]


def test_a_layer_gets_its_number_in_kv_names_and_the_checkpoints_parameter_names() -> None:
    layer = _layers(4)[3]
    assert [value.name for value in layer.graph.inputs] == ["hidden", "past_key.3"]
    assert [value.name for value in layer.graph.outputs] == ["hidden_out", "present_key.3"]
    assert "model.layers.3.fc.weight" in layer.graph.initializers


def test_hidden_flows_from_layer_to_layer_and_every_kv_stays_an_input_and_output() -> None:
    model = stitch(_layers(3), name="segment")
    assert [value.name for value in model.graph.inputs] == ["hidden", "past_key.0", "past_key.1", "past_key.2"]
    assert [value.name for value in model.graph.outputs] == ["hidden_out", "present_key.0", "present_key.1", "present_key.2"]
    first = next(node for node in model.graph if node.name.startswith("layer_001") and node.op_type == "Mul")
    assert first.inputs[0] is not None
    assert first.inputs[0].name == "layer_000.hidden_out"


def test_the_layers_themselves_are_left_as_they_were() -> None:
    layers = _layers(2)
    texts = [ir.to_onnx_text(layer) for layer in layers]
    stitch(layers, name="segment")
    assert [ir.to_onnx_text(layer) for layer in layers] == texts


def test_parameters_of_the_same_name_become_one() -> None:
    layers = _layers(2)
    for layer in layers:
        next(value for name, value in layer.graph.initializers.items() if "fc" in name).name = "tied.weight"
    model = stitch(layers, name="segment")
    assert [name for name in model.graph.initializers if name.startswith("tied")] == ["tied.weight"]
