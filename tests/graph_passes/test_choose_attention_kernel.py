"""Attention takes ONNX Runtime's faster kernel for one new token, with the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.choose_attention_kernel import ChooseAttentionKernelPass
from tests.graph_passes.running import Array, run_model

HEADS, KV_HEADS, SIZE = 32, 8, 64  # 2048 wide: the matrix kernel is the faster one from 128 positions on
SLOTS, FEW, MANY = 1024, 9, 300


def _value(name: str, shape: list[Any], kind: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))


def _model(
    heads: tuple[int, int, int] = (HEADS, KV_HEADS, SIZE),
    *,
    packed: bool = False,
    sinks: bool = False,
    layers: int = 1,
    **attributes: float,
) -> ir.Model:
    """Attention nodes side by side on the same rows, each with a KV buffer of its own."""
    queries, keys, size = heads
    widths = {"query": queries * size, "key": keys * size, "value": keys * size}
    rows = [_value("rows", ["B", "S", sum(widths.values())])] if packed else [_value(n, ["B", "S", w]) for n, w in widths.items()]
    lengths = [_value("seqlens_k", ["B"], ir.DataType.INT32), _value("total_sequence_length", [1], ir.DataType.INT32)]
    taken = [_value("sinks", [queries])] if sinks else []
    inputs, outputs, nodes = [*rows, *lengths, *taken], [], []
    given = {"scale": 0.2, "num_heads": queries, "kv_num_heads": keys, **attributes}
    for layer in range(layers):
        past, present = (
            [_value(f"{time}_{kind}.{layer}", ["B", keys, "C", size]) for kind in ("key", "value")]
            for time in ("past", "present")
        )
        made = [_value(f"y.{layer}", ["B", "S", widths["query"]]), *present]
        read = [*rows, *(3 - len(rows)) * [None], *past, *lengths, *(4 * [None] if sinks else []), *taken]
        nodes.append(ir.node("GroupQueryAttention", read, given, domain="com.microsoft", outputs=made))
        inputs, outputs = [*inputs, *past], [*outputs, *made]
    graph = ir.Graph(inputs, outputs, nodes=nodes, name="g", opset_imports={"": 24, "com.microsoft": 1})
    return ir.Model(graph, ir_version=10)


def _feeds(model: ir.Model, new: int, total: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    lengths = {"seqlens_k": np.array([total - 1, total - 1], np.int32), "total_sequence_length": np.array([total], np.int32)}
    sizes: dict[str, int] = {"B": 2, "S": new, "C": SLOTS}
    shapes = {str(v.name): [n if isinstance(n, int) else sizes[str(n.value)] for n in v.shape or ()] for v in model.graph.inputs}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} | lengths


def _assert_same(before: ir.Model, after: ir.Model, new: int, total: int) -> None:
    expected, found = (run_model(model, _feeds(model, new, total)) for model in (before, after))
    for one, other in zip(expected, found, strict=True):
        assert np.isfinite(one[:, :, :total]).all()
        np.testing.assert_allclose(other[:, :, :total], one[:, :, :total], rtol=1e-4, atol=1e-5)


def _operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scale", [0.2, 1.0])
def test_results_are_the_same_for_prompts_and_for_one_token_after_few_or_many(packed: bool, scale: float) -> None:
    before, after = (_model(packed=packed, scale=scale) for _ in range(2))
    assert ChooseAttentionKernelPass(max_length=SLOTS)(after).modified
    assert _operators(after)[-1] == "If"
    for new, total in ((4, 4), (1, FEW), (1, MANY)):
        _assert_same(before, after, new, total)
    assert not ChooseAttentionKernelPass(max_length=SLOTS)(after).modified


def test_the_faster_kernel_takes_one_new_token_after_many_and_layers_share_the_condition() -> None:
    model = _model(layers=2)
    ChooseAttentionKernelPass(max_length=SLOTS)(model)
    assert [_operators(model).count(name) for name in ("If", "Greater", "And")] == [2, 1, 1]
    choice = next(node for node in model.graph if node.op_type == "If")
    quicker = choice.attributes["then_branch"].as_graph()[-1]
    assert quicker.attributes["scale"].as_float() == 1.0
    assert (quicker.inputs[11].const_value.numpy() == -np.inf).all()  # type: ignore[union-attr]
    condition = choice.inputs[0]
    assert condition is not None
    condition.shape, condition.type = ir.Shape([1]), ir.TensorType(ir.DataType.BOOL)
    model.graph.outputs.append(condition)
    taken = {lengths: run_model(model, _feeds(model, *lengths))[-1].tolist() for lengths in ((1, FEW), (1, MANY), (MANY, MANY))}
    assert taken == {(1, FEW): [False], (1, MANY): [True], (MANY, MANY): [False]}


@pytest.mark.parametrize(("sinks", "attributes"), [(True, {}), (False, {"softcap": 5.0}), (True, {"local_window_size": 30})])
def test_where_only_one_kernel_exists_the_query_is_scaled_before_it(sinks: bool, attributes: dict[str, float]) -> None:
    before, after = (_model(packed=True, sinks=sinks, **attributes) for _ in range(2))
    assert ChooseAttentionKernelPass(max_length=SLOTS)(after).modified
    assert _operators(after) == ["Mul", "GroupQueryAttention"]
    for new, total in ((4, 4), (1, MANY)):
        _assert_same(before, after, new, total)
    assert not ChooseAttentionKernelPass(max_length=SLOTS)(after).modified


def test_only_small_heads_shared_by_many_queries_without_a_window_get_two_kernels() -> None:
    others = [_model((8, 4, 64)), _model((8, 2, 128)), _model(local_window_size=30)]
    assert not any(ChooseAttentionKernelPass(max_length=10 * SLOTS)(model).modified for model in others)
    assert ChooseAttentionKernelPass(max_length=10 * SLOTS)(_model((8, 2, 64))).modified


def test_it_declines_a_short_kv_buffer() -> None:
    assert not ChooseAttentionKernelPass(max_length=SLOTS - 1)(_model()).modified
    assert not ChooseAttentionKernelPass(max_length=SLOTS - 1)(_model(sinks=True)).modified
