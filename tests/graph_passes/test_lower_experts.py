"""The products of all experts become one operator that computes only the chosen ones'."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.lower_experts import LowerExpertsPass
from tests.graph_passes.running import Array, run_model, with_parameters

EXPERTS, WIDTH, INNER, TOKENS = 5, 8, 4, 7
# around each kind of experts: zeros for experts that are not chosen come first, the weighted sum last
_BEGIN = """length = Shape <start = 0, end = 1> (x)
    many = Shape (none)
    shape = Concat <axis = 0> (length, many)
    zeros = Expand (none, shape)
    rows = Unsqueeze (x, first)"""
_END = """scattered = ScatterElements <axis = 1> (zeros, chosen, weights)
    by_expert = Transpose <perm = [1, 0]> (scattered)
    counts = Unsqueeze (by_expert, last)
    counted = Mul (products, counts)
    y = ReduceSum <keepdims = 0> (counted, first)"""
GRAPH = """<ir_version: 10, opset_import: ["" : 24]>
g (float[T,8] x, int64[T,2] chosen, float[T,2] weights, float[5,8,8] gate_up, float[5,8,4] down) => (float[T,8] y)
<int64[1] first = {0}, int64[1] last = {2}, float[5] none = {0.0, 0.0, 0.0, 0.0, 0.0}, int64[1] second = {1}>
{
    BEGIN
    turned_up = Transpose <perm = [0, 2, 1]> (gate_up)
    both = MatMul (rows, turned_up)
    gate, up = Split <axis = 2, num_outputs = 2> (both)
    sigmoid = Sigmoid (gate)
    silu = Mul (gate, sigmoid)
    inner = Mul (silu, up)
    turned_down = Transpose <perm = [0, 2, 1]> (down)
    products = MatMul (inner, turned_down)
    END
}
""".replace("BEGIN", _BEGIN).replace("END", _END)

# Gemma 4's, with an activation that the operator lacks
GELU = GRAPH.replace("sigmoid = Sigmoid (gate)\n    silu = Mul (gate, sigmoid)", 'silu = Gelu <approximate = "tanh"> (gate)')

# Llama 4's: transposed matrices
TURNED = (
    GRAPH.replace("float[5,8,4] down", "float[5,4,8] down")
    .replace("turned_up = Transpose <perm = [0, 2, 1]> (gate_up)\n", "")
    .replace("turned_down = Transpose <perm = [0, 2, 1]> (down)\n", "")
    .replace("turned_up", "gate_up")
    .replace("turned_down", "down")
)

# Nemotron-H's: no gate, and the square of a ReLU
SQUARED = """<ir_version: 10, opset_import: ["" : 24]>
g (float[T,8] x, int64[T,2] chosen, float[T,2] weights, float[5,4,8] up, float[5,8,4] down) => (float[T,8] y)
<int64[1] first = {0}, int64[1] last = {2}, float[5] none = {0.0, 0.0, 0.0, 0.0, 0.0}, float two = {2.0}>
{
    BEGIN
    turned_up = Transpose <perm = [0, 2, 1]> (up)
    product = MatMul (rows, turned_up)
    positive = Relu (product)
    inner = Pow (positive, two)
    turned_down = Transpose <perm = [0, 2, 1]> (down)
    products = MatMul (inner, turned_down)
    END
}
""".replace("BEGIN", _BEGIN).replace("END", _END)

# gpt-oss's: transposed matrices, interleaved gate and up, biases, a clamp
BIASED = """<ir_version: 10, opset_import: ["" : 24]>
g (float[T,8] x, int64[T,2] chosen, float[T,2] weights, float[5,8,8] gate_up, float[5,4,8] down, float[5,8] up_bias,
   float[5,8] down_bias) => (float[T,8] y)
<int64[1] first = {0}, int64[1] last = {2}, float[5] none = {0.0, 0.0, 0.0, 0.0, 0.0}, int64[1] second = {1},
 int64[1] most = {9223372036854775807}, float limit = {1.5}, float low = {-1.5}, float alpha = {1.702}, float one = {1.0}>
{
    BEGIN
    product = MatMul (rows, gate_up)
    up_bias_3 = Unsqueeze (up_bias, second)
    both = Add (product, up_bias_3)
    even = Slice (both, first, most, last, last)
    odd = Slice (both, second, most, last, last)
    gate = Clip (even, , limit)
    up = Clip (odd, low, limit)
    steep = Mul (gate, alpha)
    sigmoid = Sigmoid (steep)
    swish = Mul (gate, sigmoid)
    above = Add (up, one)
    inner = Mul (above, swish)
    product_2 = MatMul (inner, down)
    down_bias_3 = Unsqueeze (down_bias, second)
    products = Add (product_2, down_bias_3)
    END
}
""".replace("BEGIN", _BEGIN).replace("END", _END)
# the clamp as it is traced in fp16
BY_TWO = BIASED.replace("Clip (even, , limit)", "Min (even, limit)").replace(
    "up = Clip (odd, low, limit)", "least = Max (odd, low)  up = Min (least, limit)"
)
NARROW = (
    GRAPH.replace("float[T,8]", "float16[T,8]")
    .replace("float[T,2]", "float16[T,2]")
    .replace("float[5", "float16[5")
    .replace("{0.0, 0.0, 0.0, 0.0, 0.0}", "{0, 0, 0, 0, 0}")
)


def mixture(text: str = GRAPH, *, width: int = WIDTH, inner: int = INNER, more: Mapping[str, Array] | None = None) -> ir.Model:
    """A graph with parameters `layer.gate_up` (`layer.up` if without gates), `layer.down`, its biases if any, and `more`."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"gate_up": (EXPERTS, 2 * inner, width), "down": (EXPERTS, width, inner)}
    if "turned_up" not in text:
        shapes = {name: (EXPERTS, columns, rows) for name, (_, rows, columns) in shapes.items()}
    if "up_bias" in text:
        shapes |= {"up_bias": (EXPERTS, 2 * inner), "down_bias": (EXPERTS, width)}
    if "gate_up" not in text:
        shapes["up"] = (EXPERTS, inner, shapes.pop("gate_up")[2])
    dtype = np.float16 if "float16" in text else np.float32
    drawn = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return with_parameters(text, drawn | dict(more or {}))


def feeds(weights: tuple[float, float], width: int = WIDTH) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "x": rng.standard_normal((TOKENS, width)).astype(np.float32),
        "chosen": np.stack([rng.permutation(EXPERTS)[:2] for _ in range(TOKENS)]),
        "weights": np.tile(np.array([weights], np.float32), (TOKENS, 1)),
    }


WEIGHTS = [(0.75, 0.25), (0.3, 0.1), (2.5, 1e-4), (1.0, 0.0)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_chosen_experts_give_the_same_result_whatever_their_weights_add_up_to(weights: tuple[float, float]) -> None:
    before, after = mixture(), mixture()
    assert LowerExpertsPass()(after).modified
    assert "MatMul" not in [node.op_type for node in after.graph]
    (node,) = [node for node in after.graph if node.op_type == "MoE"]
    assert node.attributes["k"].as_int() == 2
    assert {name for name in after.graph.initializers if "." in name} == {"layer.down", "layer.gate_up.interleaved"}
    (expected,), (found,) = run_model(before, feeds(weights)), run_model(after, feeds(weights))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_transposed_matrices_become_the_same_parameters() -> None:
    before, after, usual = mixture(TURNED), mixture(TURNED), mixture()
    for name in ("layer.gate_up", "layer.down"):
        matrices = usual.graph.initializers[name].const_value
        assert matrices is not None
        turned = matrices.numpy().swapaxes(1, 2).copy()
        for model in (before, after):
            model.graph.initializers[name].const_value = ir.tensor(turned, name=name)
    assert LowerExpertsPass()(after).modified and LowerExpertsPass()(usual).modified
    assert "MatMul" not in [node.op_type for node in after.graph]

    def stored(model: ir.Model) -> list[Array]:
        (node,) = [node for node in model.graph if node.op_type == "MoE"]
        tensors = [value.const_value for value in node.inputs if value is not None and "." in str(value.name)]
        return [tensor.numpy() for tensor in tensors if tensor is not None]

    for found, expected in zip(stored(after), stored(usual), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert len({name for name in after.graph.initializers if "." in name}) == 2
    (expected,), (found,) = run_model(before, feeds((0.7, 0.3))), run_model(after, feeds((0.7, 0.3)))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", [BIASED, BY_TWO], ids=["Clip", "Min and Max"])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_experts_with_biases_and_clamps_give_the_same_result(weights: tuple[float, float], text: str) -> None:
    before, after = mixture(text), mixture(text)
    assert LowerExpertsPass()(after).modified
    assert not {"MatMul", "Clip", "Min"} & {node.op_type for node in after.graph}
    (node,) = [node for node in after.graph if node.op_type == "MoE"]
    names = [value and value.name for value in node.inputs[2:]]
    assert names == ["layer.gate_up.turned", "layer.up_bias", "layer.down.turned", "layer.down_bias"]
    (expected,), (found,) = run_model(before, feeds(weights)), run_model(after, feeds(weights))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1e-5, 1e-2, 1.0, 1e3])
def test_squared_relus_are_gated_by_up_itself(size: float) -> None:
    before, after = mixture(SQUARED), mixture(SQUARED)
    assert LowerExpertsPass()(after).modified
    assert not {"MatMul", "Relu"} & {node.op_type for node in after.graph}
    assert {name for name in after.graph.initializers if "." in name} == {"layer.down", "layer.up.twice"}
    given = feeds((0.3, 0.1))
    given["x"] *= size  # small numbers must survive the steep sigmoid, large ones must not overflow
    (expected,), (found,) = run_model(before, given), run_model(after, given)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7 + 1e-6 * np.abs(expected).max())


def test_narrow_experts_become_the_same_operator() -> None:
    before, after = mixture(NARROW), mixture(NARROW)
    assert LowerExpertsPass()(after).modified
    assert "MatMul" not in [node.op_type for node in after.graph]
    given = {name: array.astype(np.float16) if array.dtype == np.float32 else array for name, array in feeds((0.3, 0.1)).items()}
    (expected,), (found,) = run_model(before, given), run_model(after, given)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-3 * np.abs(expected).max())


def test_a_graph_without_experts_stays_as_it_is() -> None:
    model = ir.from_onnx_text('<ir_version: 10, opset_import: ["" : 24]> g (float[B,8] x) => (float[B,8] y) { y = Relu (x) }')
    assert not LowerExpertsPass()(model).modified


def test_products_of_all_tokens_by_blocks_of_one_matrix_are_no_experts() -> None:
    """Griffin's gates."""
    text = """<ir_version: 10, opset_import: ["" : 24]>
    g (float[4,T,8] x, float[4,8,8] blocks) => (float[4,T,8] y) { y = MatMul (x, blocks) }"""
    model = with_parameters(text, {"blocks": np.ones((4, 8, 8), dtype=np.float32)})
    assert not LowerExpertsPass()(model).modified


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (GRAPH, "Mul (gate, sigmoid)", "Mul (sigmoid, sigmoid)"),
        (BIASED, "Mul (gate, sigmoid)", "Mul (sigmoid, sigmoid)"),
        (BIASED, "low = {-1.5}", "low = {-1.0}"),
        (BIASED, "odd = Slice (both, second", "odd = Slice (both, first"),
    ],
    ids=["another", "another, biased", "clamped otherwise", "gates alone"],
)
def test_experts_with_another_activation_are_an_error(text: str, old: str, new: str) -> None:
    with pytest.raises(ir.passes.PostconditionError, match=r"layer\.gate_up"):
        LowerExpertsPass()(mixture(text.replace(old, new)))
