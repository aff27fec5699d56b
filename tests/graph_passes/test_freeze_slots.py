"""KV buffers of C slots get a fixed number of slots."""

from __future__ import annotations

import onnx_ir as ir

from skipdecode.graph_passes.freeze_slots import FreezeSlotsPass

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
layer (float[B,2,S,16] key, float[B,2,C,16] past_key, int64[B] start) => (float[B,2,C,16] present_key)
{
    present_key = TensorScatter <axis = 2> (past_key, key, start)
}
"""


def test_only_dimensions_of_slots_become_a_number() -> None:
    model = ir.from_onnx_text(BEFORE)
    assert FreezeSlotsPass(slots=48)(model).modified
    shapes = {value.name: str(value.shape) for value in (*model.graph.inputs, *model.graph.outputs)}
    assert shapes == {"key": "[B,2,S,16]", "past_key": "[B,2,48,16]", "start": "[B]", "present_key": "[B,2,48,16]"}
    assert not FreezeSlotsPass(slots=48)(model).modified
