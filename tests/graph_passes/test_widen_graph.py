"""A graph in half precision becomes one in single precision."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from skipdecode.graph_passes.widen_graph import WidenGraphPass
from tests.graph_passes.running import run_model, with_shapes
from tests.graph_passes.test_clean_trace import with_weight

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
norm (float16[B,S,4] x) => (float16[B,S,3] out)
{
    wide = Cast <to = 1> (x)
    double = Add (wide, wide)
    narrow = Cast <to = 10> (double)
    again = Sub (narrow, x)
    turned = Transpose <perm = [1, 0]> (weight)
    out = MatMul (again, turned)
}
"""


def _before() -> ir.Model:
    model = with_weight(BEFORE, "mlp.weight", np.arange(1, 13, dtype=np.float16).reshape(3, 4))
    ir.passes.common.ShapeInferencePass()(model)
    return model


def test_values_weights_and_results_are_single_precision_and_casts_are_dropped() -> None:
    model = _before()
    assert WidenGraphPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Add", "Sub", "Transpose", "MatMul"]
    assert {value.dtype for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values())} == {
        ir.DataType.FLOAT
    }
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    (found,) = run_model(model, {"x": x})
    np.testing.assert_allclose(found, x @ np.arange(1, 13, dtype=np.float32).reshape(3, 4).T, rtol=1e-5)
    assert not WidenGraphPass()(model).modified


def test_weights_are_cast_only_when_they_are_written() -> None:
    model = _before()
    WidenGraphPass()(model)
    assert isinstance(model.graph.initializers["mlp.weight"].const_value, ir.LazyTensor)


def test_widening_a_clone_leaves_the_original_narrow() -> None:
    model = _before()
    WidenGraphPass()(model.clone())
    assert model.graph.inputs[0].dtype == model.graph.initializers["mlp.weight"].dtype == ir.DataType.FLOAT16


def test_the_number_that_fills_a_shape_is_single_precision_too() -> None:
    """Phi-3.5-MoE's router marks the experts that are taken with such a number; 50176 are the bits of -4."""
    text = """<ir_version: 10, opset_import: ["" : 24]>
    marks (float16[B,3] scores, int64[B,1] taken) => (float16[B,3] out)
    {
        sizes = Shape (taken)
        never = ConstantOfShape <value = float16[1] {50176}> (sizes)
        out = ScatterElements <axis = 1> (scores, taken, never)
    }"""
    model = with_shapes(text)
    assert WidenGraphPass()(model).modified
    (found,) = run_model(model, {"scores": np.ones((2, 3), np.float32), "taken": np.array([[1], [2]])})
    assert found.dtype == np.float32 and found.tolist() == [[1, -4, 1], [1, 1, -4]]
