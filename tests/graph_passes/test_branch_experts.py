"""Every expert's product before; after, those of a branch an expert, which runs where a token has a share of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.branch_experts import BranchExpertsPass
from skipdecode.graph_passes.explicit_experts import READ_SHARE
from skipdecode.graph_passes.lower_experts import LowerExpertsPass
from skipdecode.graph_passes.quantization import Quantization
from tests.graph_passes.running import Array, run_model
from tests.graph_passes.test_lower_experts import EXPERTS, GELU, GRAPH, TOKENS, WEIGHTS, feeds, mixture


def _branches(model: ir.Model) -> Iterator[ir.Graph]:
    """What runs of each expert."""
    for node in model.graph:
        if node.op_type == "If":
            yield node.attributes["then_branch"].as_graph()


@pytest.mark.parametrize("tokens", [1, TOKENS])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_the_experts_that_have_a_share_give_what_all_of_them_gave(weights: tuple[float, float], tokens: int) -> None:
    before, after = mixture(GELU), mixture(GELU)
    assert BranchExpertsPass(None)(after).modified
    assert "MatMul" not in [node.op_type for node in after.graph] and len([*_branches(after)]) == EXPERTS
    given = {name: numbers[:tokens] for name, numbers in feeds(weights).items()}
    (expected,), (found,) = run_model(before, given), run_model(after, given)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not BranchExpertsPass(None)(after).modified
    assert not LowerExpertsPass()(after).modified, "none is left for the operator"


def test_an_expert_that_no_token_chose_is_not_computed() -> None:
    """Its numbers would make NaN of every token, as a share of 0 times infinity."""
    model, given = mixture(GELU), feeds((0.7, 0.3))
    given["chosen"] = np.tile(np.array([[0, 1]]), (TOKENS, 1))
    BranchExpertsPass(None)(model)
    (before,) = run_model(model, given)
    for name, value in model.graph.initializers.items():
        if name.startswith("layer.") and not name.endswith((".0", ".1")):
            assert value.const_value is not None
            value.const_value = ir.tensor(np.full(value.const_value.shape.numpy(), np.inf, np.float32), name=name)
    np.testing.assert_array_equal(run_model(model, given)[0], before)


def test_each_expert_has_matrices_of_its_own_which_its_branch_reads_from_outside() -> None:
    model = mixture(GELU)
    BranchExpertsPass(None)(model)
    stored = {name: value for name, value in model.graph.initializers.items() if name.startswith("layer.")}
    assert stored.keys() == {f"layer.{part}.{expert}" for part in ("gate_up", "down") for expert in range(EXPERTS)}
    assert {value.meta[READ_SHARE] for value in stored.values()} == {2 / EXPERTS}
    names = [value.name for graph in _branches(model) for node in graph for value in node.outputs]
    outside = {value.name for node in model.graph for value in node.outputs}
    assert len(names) == len({*names}) and not outside & {*names}
    assert not [name for graph in _branches(model) for name in graph.initializers]


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_they_give_what_all_of_them_gave_on_the_same_levels(bits: int) -> None:
    """Rows lie on levels, so that rounding them to int8 is all that differs."""
    how = Quantization(bits=bits, method="rtn", block_size=32)
    rng, most = np.random.default_rng(0), 2 ** (bits - 1) - 1
    levels = {name: rng.integers(-most, most + 1, shape) for name, shape in (("gate_up", (5, 64, 32)), ("down", (5, 32, 32)))}
    for numbers in levels.values():
        numbers[:, :, 0] = most + 1  # of which a scale is made
    matrices = {name: (-numbers / (8 * most)).astype(np.float32) for name, numbers in levels.items()}
    text = (
        GELU.replace("float[T,8]", "float[T,32]")
        .replace("[5,8,8] gate_up", "[5,64,32] gate_up")
        .replace("[5,8,4] down", "[5,32,32] down")
    )
    before, after = (mixture(text, width=32, inner=32) for _ in range(2))
    for model in (before, after):
        for name, numbers in matrices.items():
            model.graph.initializers[f"layer.{name}"].const_value = ir.tensor(numbers, name=f"layer.{name}")
    assert BranchExpertsPass(how)(after).modified
    assert {node.op_type for graph in _branches(after) for node in graph} >= {"MatMulNBits", "Gelu"}
    given = feeds((0.7, 0.3), 32)
    (expected,), (found,) = run_model(before, given), run_model(after, given)
    assert _error(found, expected) < 0.02


def test_a_tensor_that_is_cast_as_it_is_read_is_read_once_for_all_experts() -> None:
    model, read = mixture(GELU), []
    parameter = model.graph.initializers["layer.gate_up"]
    tensor = parameter.const_value
    assert tensor is not None

    def cast() -> ir.TensorProtocol:
        read.append(1)
        return ir.tensor(tensor.numpy(), name=tensor.name)

    parameter.const_value = ir.LazyTensor(cast, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name)  # type: ignore[arg-type]
    BranchExpertsPass(None)(model)
    made = [model.graph.initializers[f"layer.gate_up.{expert}"].const_value for expert in range(EXPERTS)]
    for times in (1, 2):  # as for two files
        for expert, matrix in enumerate(made):
            assert matrix is not None
            np.testing.assert_array_equal(matrix.numpy(), tensor.numpy()[expert].T)
        assert len(read) == times


def _error(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_experts_that_the_operator_has_are_left_to_it() -> None:
    assert not BranchExpertsPass(None)(mixture(GRAPH)).modified
