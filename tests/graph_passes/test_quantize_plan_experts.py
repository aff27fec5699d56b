"""Experts' matrices become levels and the operators that turn levels into floats."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.quantization import METHODS, Quantization
from skipdecode.graph_passes.quantize_plan_experts import QuantizePlanExpertsPass
from skipdecode.graph_passes.quantize_plan_weights import QuantizePlanWeightsPass
from skipdecode.graph_passes.write_out_experts import READ_FRACTION
from tests.graph_passes.running import Array, run_model, with_parameters
from tests.graph_passes.test_kept_levels import stored
from tests.graph_passes.test_quantize_weights import quantisable

EXPERTS, OUTPUTS, INPUTS = 3, 24, 64
TEXT = """<ir_version: 10, opset_import: ["" : 24]>
g (int64[K] chosen, float[3,24,64] weight) => (float[K,24,64] y, float[3,64,24] turned)
{ y = Gather (weight, chosen)  turned = Transpose <perm = [0, 2, 1]> (weight) }"""


def _weight() -> Array:
    return np.random.default_rng(0).standard_normal((EXPERTS, OUTPUTS, INPUTS)).astype(np.float32)


def _looked_up(model: ir.Model) -> tuple[Array, Array]:
    """The matrices [E,N,K] as a step and as a prompt read them."""
    one, all_turned = run_model(model, {"chosen": np.arange(EXPERTS)})
    return one, all_turned.swapaxes(1, 2)


@pytest.mark.parametrize("how", [Quantization(bits=8), *(Quantization(bits=4, method=name) for name in METHODS)], ids=str)
def test_each_experts_matrix_is_quantised_as_it_would_be_alone(how: Quantization) -> None:
    weight = _weight()
    weight[1] += 0.3  # so that the search moves its zero point
    model = with_parameters(TEXT, {"weight": weight})
    assert QuantizePlanExpertsPass(how)(model).modified
    of_a_step, of_a_prompt = _looked_up(model)
    np.testing.assert_array_equal(of_a_step, of_a_prompt)
    for expert in range(EXPERTS):
        alone = quantisable("linear", weight[expert])
        ir.passes.common.ShapeInferencePass()(alone)
        QuantizePlanWeightsPass(how)(alone)
        (expected,) = run_model(alone, {"x": np.eye(INPUTS, dtype=np.float32)[None]})
        np.testing.assert_allclose(of_a_step[expert], expected[0].T, atol=1e-5)
    assert not QuantizePlanExpertsPass(how)(model).modified


def test_experts_on_levels_keep_them_even_if_their_zero_points_differ() -> None:
    weight = np.stack(
        [stored(4, 64, symmetric=expert < 2, seed=expert, rows=OUTPUTS, inputs=INPUTS) for expert in range(EXPERTS)]
    )
    model = with_parameters(TEXT, {"weight": weight})
    assert QuantizePlanExpertsPass(Quantization(bits=4))(model).modified
    np.testing.assert_allclose(_looked_up(model)[0], weight, atol=1e-5)


def test_levels_are_stored_once_and_scales_in_fp32_whatever_the_weights_dtype() -> None:
    for bits, kind in ((4, ir.DataType.INT4), (8, ir.DataType.INT8)):
        model = with_parameters(TEXT.replace("float[", "float16["), {"weight": _weight().astype(np.float16)})
        model.graph.initializers["layer.weight"].meta[READ_FRACTION] = 2 / 3
        QuantizePlanExpertsPass(Quantization(bits=bits))(model)
        found = {name.rsplit(".", 1)[-1]: value for name, value in model.graph.initializers.items()}
        assert found.keys() == {"levels", "scales"}
        assert (found["levels"].dtype, found["scales"].dtype) == (kind, ir.DataType.FLOAT)
        assert list(found["levels"].shape or ()) == [EXPERTS * OUTPUTS, INPUTS]
        assert {value.meta[READ_FRACTION] for value in found.values()} == {2 / 3}
        assert _looked_up(model)[0].dtype == np.float16


def test_it_declines_weights_that_are_not_looked_up_and_blocks_that_do_not_fit() -> None:
    text = TEXT.replace("y = Gather (weight, chosen)", "y = Add (weight, weight)").replace("float[K,24,64] y", "float[3,24,64] y")
    assert not QuantizePlanExpertsPass(Quantization(bits=8))(with_parameters(text, {"weight": _weight()})).modified
    model = with_parameters(TEXT, {"weight": _weight()})
    assert not QuantizePlanExpertsPass(Quantization(bits=4, block_size=128))(model).modified
