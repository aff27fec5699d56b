"""An input that nothing reads is dropped."""

from __future__ import annotations

import onnx_ir as ir

from skipdecode.graph_passes.drop_unused_inputs import DropUnusedInputsPass

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
embed (int64[B,S] input_ids, int64[B,S] position_ids, float[B] through) => (float[B,S,4] hidden, float[B] through)
<float[9,4] table>
{
    hidden = Gather (table, input_ids)
}
"""


def test_an_unread_input_is_dropped_unless_it_is_an_output() -> None:
    model = ir.from_onnx_text(BEFORE)
    assert DropUnusedInputsPass()(model).modified
    assert [value.name for value in model.graph.inputs] == ["input_ids", "through"]
    assert not DropUnusedInputsPass()(model).modified
