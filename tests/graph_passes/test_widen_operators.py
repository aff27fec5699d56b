"""An operator without a bf16 kernel runs in fp32 between casts."""

from __future__ import annotations

import onnx_ir as ir

from skipdecode.graph_passes.widen_operators import WidenOperatorsPass

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
g (bfloat16[B,4] x) => (bfloat16[B,4] y, bool[B,4] z)
{
    doubled = Add (x, x)
    y = Log (doubled)
    z = Greater (doubled, y)
}"""


def _before(kind: str = "bfloat16") -> ir.Model:
    model = ir.from_onnx_text(BEFORE.replace("bfloat16", kind))
    ir.passes.common.ShapeInferencePass()(model)
    return model


def test_bf16_is_cast_to_fp32_and_back() -> None:
    model = _before()
    assert WidenOperatorsPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Add", "Cast", "Log", "Cast", "Cast", "Cast", "Greater"]
    for node in model.graph:
        if node.op_type in ("Log", "Greater"):
            assert {value.dtype for value in node.inputs if value is not None} == {ir.DataType.FLOAT}
    assert [(value.name, value.dtype) for value in model.graph.outputs] == [("y", ir.DataType.BFLOAT16), ("z", ir.DataType.BOOL)]
    assert not WidenOperatorsPass()(model).modified


def test_fp16_stays() -> None:
    assert not WidenOperatorsPass()(_before("float16")).modified
