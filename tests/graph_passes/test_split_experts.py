"""Each expert's product with all tokens becomes one with the tokens that chose it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.lower_experts import LowerExpertsPass
from skipdecode.graph_passes.quantization import Quantization
from skipdecode.graph_passes.quantize_weights import QuantizeWeightsPass
from skipdecode.graph_passes.split_experts import SplitExpertsPass
from skipdecode.graph_passes.write_out_experts import READ_FRACTION
from tests.graph_passes.running import relative_error, run_model
from tests.graph_passes.test_lower_experts import EXPERTS, GELU, GRAPH, TOKENS, WEIGHTS, feeds, mixture


@pytest.mark.parametrize("tokens", [1, TOKENS])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_experts_with_only_their_own_tokens_give_the_same_result(weights: tuple[float, float], tokens: int) -> None:
    before, after = mixture(GELU), mixture(GELU)
    assert SplitExpertsPass()(after).modified
    given = {name: numbers[:tokens] for name, numbers in feeds(weights).items()}
    (expected,), (found,) = run_model(before, given), run_model(after, given)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not SplitExpertsPass()(after).modified
    assert not LowerExpertsPass()(after).modified, "no experts are left for the operator"


def test_an_expert_that_no_token_chose_multiplies_nothing() -> None:
    """Its infinite weights would turn every token into NaN, as 0 times infinity."""
    model, given = mixture(GELU), feeds((0.7, 0.3))
    given["chosen"] = np.tile(np.array([[0, 1]]), (TOKENS, 1))
    SplitExpertsPass()(model)
    (before,) = run_model(model, given)
    for name, value in model.graph.initializers.items():
        if name.startswith("layer.") and not name.endswith((".0", ".1")):
            assert value.const_value is not None
            value.const_value = ir.tensor(np.full(value.const_value.shape.numpy(), np.inf, np.float32), name=name)
    np.testing.assert_array_equal(run_model(model, given)[0], before)


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_each_expert_has_its_own_matrices_marked_with_the_fraction_that_a_step_reads(bits: int | None) -> None:
    model, parts = _wide()[1], [""]
    SplitExpertsPass()(model)
    if bits is not None:
        QuantizeWeightsPass(Quantization(bits=bits, method="rtn", block_size=32))(model)
        parts = [".quantised.weight", ".quantised.scales"]
    stored = {name: value for name, value in model.graph.initializers.items() if name.startswith("layer.")}
    assert stored.keys() == {
        f"layer.{name}.{expert}{part}" for name in ("gate_up", "down") for expert in range(EXPERTS) for part in parts
    }
    assert {value.meta[READ_FRACTION] for value in stored.values()} == {2 / EXPERTS}


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_experts_give_the_same_result_on_the_same_levels(bits: int) -> None:
    """The matrices lie on levels, so only the rounding of activations to int8 differs."""
    before, after = _wide(bits)
    SplitExpertsPass()(after)
    assert QuantizeWeightsPass(Quantization(bits=bits, method="rtn", block_size=32))(after).modified
    assert sum(node.op_type == "MatMulNBits" for node in after.graph) == 2 * EXPERTS
    given = feeds((0.7, 0.3), 32)
    (expected,), (found,) = run_model(before, given), run_model(after, given)
    assert relative_error(found, expected) < 0.02


def _wide(bits: int = 4) -> tuple[ir.Model, ir.Model]:
    """Two copies of a mixture whose matrices have rows of one block of 32, on levels of `bits` bits."""
    rng, most = np.random.default_rng(0), 2 ** (bits - 1) - 1
    levels = {name: rng.integers(-most, most + 1, shape) for name, shape in (("gate_up", (5, 64, 32)), ("down", (5, 32, 32)))}
    for numbers in levels.values():
        numbers[:, :, 0] = most + 1  # determines the scale
    text = GELU.replace("float[T,8]", "float[T,32]").replace("[5,8,8] gate_up", "[5,64,32] gate_up")
    made = [mixture(text.replace("[5,8,4] down", "[5,32,32] down"), width=32, inner=32) for _ in range(2)]
    for model in made:
        for name, numbers in levels.items():
            matrices = (-numbers / (8 * most)).astype(np.float32)
            model.graph.initializers[f"layer.{name}"].const_value = ir.tensor(matrices, name=f"layer.{name}")
    return made[0], made[1]


def test_a_tensor_cast_on_reading_is_read_once_for_all_experts() -> None:
    model, read = mixture(GELU), []
    parameter = model.graph.initializers["layer.gate_up"]
    tensor = parameter.const_value
    assert tensor is not None

    def cast() -> ir.TensorProtocol:
        read.append(1)
        return ir.tensor(tensor.numpy(), name=tensor.name)

    parameter.const_value = ir.LazyTensor(cast, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name)  # type: ignore[arg-type]
    SplitExpertsPass()(model)
    made = [model.graph.initializers[f"layer.gate_up.{expert}"].const_value for expert in range(EXPERTS)]
    for times in (1, 2):  # as when two files are written
        for expert, matrix in enumerate(made):
            assert matrix is not None
            np.testing.assert_array_equal(matrix.numpy(), tensor.numpy()[expert])
        assert len(read) == times


def test_experts_that_the_operator_supports_are_left_to_it() -> None:
    assert not SplitExpertsPass()(mixture(GRAPH)).modified
