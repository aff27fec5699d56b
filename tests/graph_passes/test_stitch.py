"""Layers joined into one graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from skipdecode.graph_passes.stitch import instantiate, stitch
from tests.graph_passes.running import run_model


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
    return [instantiate(template, i, None, f"model.layers.{i}.") for i in range(count)]


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


def test_the_layers_themselves_are_left_unchanged() -> None:
    layers = _layers(2)
    texts = [ir.to_onnx_text(layer) for layer in layers]
    stitch(layers, name="segment")
    assert [ir.to_onnx_text(layer) for layer in layers] == texts


def test_the_newest_opset_of_any_layer_is_imported() -> None:
    for versions in ((27, 24), (24, 27)):
        layers = _layers(2)
        for layer, version in zip(layers, versions, strict=True):
            layer.graph.opset_imports[""] = version
        assert stitch(layers, name="segment").graph.opset_imports[""] == 27


def test_parameters_of_the_same_name_become_one() -> None:
    layers = _layers(2)
    for layer in layers:
        next(value for name, value in layer.graph.initializers.items() if "fc" in name).name = "tied.weight"
    model = stitch(layers, name="segment")
    assert [name for name in model.graph.initializers if name.startswith("tied")] == ["tied.weight"]


def test_different_tables_of_the_same_name_stay_separate() -> None:
    """Otherwise layers with rotary bases of their own would all get the lowest layer's frequencies."""
    layers = _layers(2)
    for index, layer in enumerate(layers):
        table = ir.tensor(np.array([index], dtype=np.float32), name="rotary.inv_freq")
        layer.graph.register_initializer(ir.Value(name=table.name, const_value=table))
    model = stitch(layers, name="segment")
    tables = {name: value.const_value for name, value in model.graph.initializers.items() if name.endswith("rotary.inv_freq")}
    assert [*tables] == ["rotary.inv_freq", f"{layers[1].graph.name}.rotary.inv_freq"]
    assert [table.numpy().tolist() for table in tables.values() if table is not None] == [[0.0], [1.0]]


def _reader(layer: int, keys_of: int) -> ir.Model:
    """A layer that reads another layer's keys and its own number."""
    template = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 24]>
        layer (float[B,S,4] hidden, float[B,1,C,4] present_key, int64[1] layer_index) => (float[B,S,4] hidden_out)
        <int64[1] sizes = {2}> {
            sum = ReduceSum <keepdims = 0> (present_key, sizes)
            number = Cast <to = 1> (layer_index)
            more = Add (hidden, sum)
            hidden_out = Mul (more, number)
        }"""
    )
    return instantiate(template, layer, keys_of, "layer.")


def test_a_layer_that_reads_anothers_keys_gets_them_by_that_layers_number_and_has_its_own() -> None:
    layer = _reader(3, 1)
    assert [value.name for value in layer.graph.inputs] == ["hidden", "present_key.1"]
    assert layer.graph.initializers["layer_index"].const_value.numpy().tolist() == [3]  # type: ignore[union-attr]


def test_keys_that_a_layer_reads_come_from_the_layer_below_or_from_an_input() -> None:
    layers = _layers(2)
    joined = stitch([*layers, _reader(2, 1), _reader(3, 1)], name="segment")
    assert [value.name for value in joined.graph.inputs] == ["hidden", "past_key.0", "past_key.1"]
    assert [value.name for value in joined.graph.outputs] == ["hidden_out", "present_key.0", "present_key.1"]
    sums = [node for node in joined.graph if node.op_type == "ReduceSum"]
    assert [node.inputs[0] for node in sums] == 2 * [joined.graph.outputs[2]]
    apart = stitch([_reader(2, 1), _reader(3, 1)], name="segment")
    assert [value.name for value in apart.graph.inputs] == ["hidden", "present_key.1"]
    keys = np.arange(24, dtype=np.float32).reshape(1, 1, 6, 4)
    (found,) = run_model(apart, {"hidden": np.ones((1, 1, 4), np.float32), "present_key.1": keys})
    total = keys.sum(axis=2)
    np.testing.assert_array_equal(found, ((1 + total) * 2 + total) * 3)
