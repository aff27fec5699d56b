"""Each row's first token is multiplied only by its chosen experts instead of by all, with the same results."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.write_out_experts import READ_FRACTION, WriteOutExpertsPass
from tests.graph_passes.running import Array, run_model
from tests.graph_passes.test_lower_experts import BIASED, EXPERTS, GELU, GRAPH, SQUARED, TURNED, WIDTH, mixture

KINDS = {"gated": GRAPH, "gelu": GELU, "turned": TURNED, "squared": SQUARED, "biased": BIASED}


def _of_rows(text: str) -> str:
    """The same graph with tokens [B,S,8], as in models."""
    body = text.index("{\n") + 2
    flat = "    flat = Constant <value_ints = [-1, 8]> ()\n    x = Reshape (hidden, flat)\n"
    return text[:body].replace("[T,8] x,", "[B,S,8] hidden,") + flat + text[body:]


def _feeds(rows: int, tokens: int) -> dict[str, Array]:
    rng = np.random.default_rng(tokens)
    weights = rng.uniform(0.1, 2, (rows * tokens, 2)).astype(np.float32)
    weights[0, 1] = 0
    return {
        "hidden": rng.standard_normal((rows, tokens, WIDTH)).astype(np.float32),
        "chosen": np.stack([rng.permutation(EXPERTS)[:2] for _ in range(rows * tokens)]),
        "weights": weights,
    }


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 1), (1, 7), (2, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_prompts_give_the_same_results_as_all_experts(kind: str, rows: int, tokens: int) -> None:
    model, feeds = mixture(_of_rows(KINDS[kind])), _feeds(rows, tokens)
    (before,) = run_model(model, feeds)
    assert WriteOutExpertsPass()(model).modified
    assert {node.domain for node in model.graph} == {""}
    np.testing.assert_allclose(run_model(model, feeds)[0], before, rtol=1e-5, atol=1e-5)
    assert not WriteOutExpertsPass()(model).modified


@pytest.mark.parametrize(("rows", "tokens"), [(3, 1), (2, 5)])
def test_tokens_may_be_projected_before_the_experts(rows: int, tokens: int) -> None:
    """Like Nemotron-H's experts, which are narrower than its layers."""
    text = _of_rows(SQUARED).replace("x = Reshape (hidden, flat)", "all = Reshape (hidden, flat)\n    x = Tanh (all)")
    model, feeds = mixture(text), _feeds(rows, tokens)
    (before,) = run_model(model, feeds)
    assert WriteOutExpertsPass()(model).modified
    np.testing.assert_allclose(run_model(model, feeds)[0], before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_that_nobody_chose_may_overflow(kind: str) -> None:
    """In fp16 products beyond 65504 do, and a weight of 0 would turn them into NaN."""
    model, feeds = mixture(_of_rows(KINDS[kind])), _feeds(2, 5)
    feeds["chosen"] = feeds["chosen"] % (EXPERTS - 1)
    feeds["chosen"][:, 1] = (feeds["chosen"][:, 0] + 1) % (EXPERTS - 1)
    (before,) = run_model(model, feeds)
    WriteOutExpertsPass()(model)
    for name, value in model.graph.initializers.items():
        if name.startswith("layer."):
            assert value.const_value is not None
            numbers = value.const_value.numpy().copy()
            numbers[EXPERTS - 1] = 1e30
            value.const_value = ir.tensor(numbers, name=name)
    np.testing.assert_allclose(run_model(model, feeds)[0], before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_looks_up_the_same_parameters_that_a_prompt_multiplies_by(kind: str) -> None:
    model = mixture(_of_rows(KINDS[kind]))
    WriteOutExpertsPass()(model)
    stored = {name for name in model.graph.initializers if name.startswith("layer.")}
    looked_up = {node.inputs[0].name for node in model.graph if node.op_type == "Gather" and node.inputs[0] is not None}
    assert looked_up == stored, "parameters have no second copy"


@pytest.mark.parametrize("kind", KINDS)
def test_each_parameter_is_marked_with_the_fraction_that_a_step_reads(kind: str) -> None:
    model = mixture(_of_rows(KINDS[kind]))
    WriteOutExpertsPass()(model)
    shares = {value.meta.get(READ_FRACTION) for name, value in model.graph.initializers.items() if name.startswith("layer.")}
    assert shares == {2 / EXPERTS}


def test_experts_that_would_all_be_read_are_an_error() -> None:
    text = _of_rows(GRAPH).replace("Sigmoid", "Tanh")
    with pytest.raises(ir.passes.PostconditionError, match="experts of which a step reads all"):
        WriteOutExpertsPass()(mixture(text))


def test_a_graph_without_experts_stays_as_it_is() -> None:
    text = """<ir_version: 10, opset_import: ["" : 24]> g (float[B,S,8] x) => (float[B,S,8] y) { y = Relu (x) }"""
    assert not WriteOutExpertsPass()(ir.from_onnx_text(text)).modified
