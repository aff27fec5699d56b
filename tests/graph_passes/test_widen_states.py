"""A layer's states become fp32 instead of fp16, together with what lies between them and the nearest products."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from skipdecode.graph_passes.widen_states import WidenStatesPass

# a projection, a convolution, two heads of linear attention and a norm in fp32; the rest is another part of the layer
BEFORE = """<ir_version: 10, opset_import: ["" : 27]>
layer (float16[B,S,8] hidden, float16[8,6] up, float16[6,1,4] w, float16[B,6,3] past_conv_state,
       float16[B,2,3,3] past_recurrent_state, float16[B,S,2] g, float16[B,S,2] beta, float16[6,8] down)
    => (float16[B,S,8] y, float16[B,6,3] present_conv_state, float16[B,2,3,3] present_recurrent_state)
{
    rows = MatMul (hidden, up)
    channels = Transpose <perm = [0, 2, 1]> (rows)
    mixed, present_conv_state = CausalConvWithState <activation = "silu"> (channels, w, , past_conv_state)
    turned = Transpose <perm = [0, 2, 1]> (mixed)
    doubled = Add (turned, turned)
    read, present_recurrent_state = LinearAttention <q_num_heads = 2, kv_num_heads = 2, update_rule = "gated_delta", scale = 0.5>
        (turned, turned, doubled, past_recurrent_state, g, beta)
    wide = Cast <to = 1> (read)
    root = Sqrt (wide)
    narrow = Cast <to = 10> (root)
    gated = Mul (narrow, turned)
    y = MatMul (gated, down)
}
"""


@pytest.fixture
def layer() -> ir.Model:
    return _typed(ir.from_onnx_text(BEFORE), {"wide", "root"})


def _typed(model: ir.Model, wide: set[str]) -> ir.Model:
    """Set every value's type, which inference does not know in opset 27: fp32 for those in `wide`, else the inputs'."""
    given = model.graph.inputs[0].dtype
    assert given is not None
    for node in model.graph:
        for value in node.outputs:
            value.type = ir.TensorType(ir.DataType.FLOAT if value.name in wide else given)
    return model


def _types(values: object) -> set[ir.DataType | None]:
    return {value.dtype for value in values if value is not None}  # type: ignore[attr-defined]


def test_states_and_values_between_two_operators_with_states_are_wide(layer: ir.Model) -> None:
    assert WidenStatesPass()(layer).modified
    by_type = {node.op_type: node for node in layer.graph}
    for name in ("CausalConvWithState", "LinearAttention", "Add"):
        assert _types((*by_type[name].inputs, *by_type[name].outputs)) == {ir.DataType.FLOAT}, name
    for value in (*layer.graph.inputs, *layer.graph.outputs):
        assert value.dtype == (ir.DataType.FLOAT if "state" in str(value.name) else ir.DataType.FLOAT16), value.name
    assert not WidenStatesPass()(layer).modified


def test_products_stay_narrow_and_only_values_that_cross_are_cast(layer: ir.Model) -> None:
    WidenStatesPass()(layer)
    for node in layer.graph:
        if node.op_type == "MatMul":
            assert _types((*node.inputs, *node.outputs)) == {ir.DataType.FLOAT16}
    casts = [(node.inputs[0], node.attributes["to"].as_int()) for node in layer.graph if node.op_type == "Cast"]
    crossing = [(str(value.name), to) for value, to in casts if value is not None]
    assert sorted(crossing) == [("beta", 1), ("channels", 1), ("g", 1), ("root", 10), ("turned", 10), ("w", 1)]


def test_a_wide_graph_stays_as_it_is() -> None:
    model = _typed(ir.from_onnx_text(BEFORE.replace("float16", "float")), set())
    assert not WidenStatesPass()(model).modified


def test_a_state_that_is_kept_transposed_is_wide_through_its_transposes() -> None:
    text = BEFORE.replace("float16[B,2,3,3] past_recurrent_state", "float16[B,3,2] past_recurrent_state")
    text = text.replace("float16[B,2,3,3] present_recurrent_state", "float16[B,3,2] present_recurrent_state")
    text = text.replace(", past_recurrent_state, g", ", past, g").replace("read, present_recurrent_state", "read, present")
    turn = "Transpose <perm = [0, 2, 1]>"
    text = text.replace("    read,", f"    fore = {turn} (past_recurrent_state)\n    past = Unsqueeze (fore, last)\n    read,")
    back = f"    back = Squeeze (present, last)\n    present_recurrent_state = {turn} (back)\n"
    text = text.replace("    wide =", f"{back}    wide =").replace("{\n    rows", "<int64[1] last = {-1}>\n{\n    rows")
    layer = _typed(ir.from_onnx_text(text), {"wide", "root"})
    assert WidenStatesPass()(layer).modified
    for value in (*layer.graph.inputs, *layer.graph.outputs):
        assert value.dtype == (ir.DataType.FLOAT if "state" in str(value.name) else ir.DataType.FLOAT16), value.name
    turns = [node for node in layer.graph if node.op_type in ("Squeeze", "Unsqueeze")]
    assert _types(node.outputs[0] for node in turns) == {ir.DataType.FLOAT}
    assert not WidenStatesPass()(layer).modified
