"""Choose the faster of GroupQueryAttention's two CPU kernels for decode steps that attend to many positions.

    GroupQueryAttention(query, .., scale)
    -> If(one new token a row, many positions):  GroupQueryAttention(query * scale, .., head_sink = -inf, scale = 1)
       else:                                     GroupQueryAttention(query, .., scale)

    GroupQueryAttention(query, .., sinks, a cap or another layer's keys, scale)
    -> GroupQueryAttention(query * scale, .., scale = 1)

Why: for one new token ONNX Runtime 1.32 has two kernels. The default one reads each key by dot products. The other one multiplies
matrices, and runs where there are sinks (a sink of -inf takes no share). MLAS packs the matrix even to multiply a single row by
it, unless the factor is 1, so the scale moves to the query. The matrix kernel is faster for the second and later query heads of a
key head, not for the first.

A decode step in int4 at batch 1, 16 layers of width 1024 with 16 query and 4 key heads of 64 in one segment, four pairs of
bundles exported one after another, interleaved in one process (AMD EPYC with AVX-512, 2 cores): 1.14x to 1.19x as fast at 1900
positions, 1.06x and 1.10x at 700, 0.99x to 1.06x at 400 and 500. The `If` costs 6 to 20 us a layer, so that at 32 and 100
positions it is 0.95x to 0.98x. (Two exports of one model differ by up to a tenth, depending on
how the page cache holds their files.)

The operator by itself, 8 layers, interleaved (query/key heads x head size):

    positions   16/4 x 64   32/8 x 64   16/8 x 128   32/8 x 128   28/4 x 128
    100         1.5x        1.7x        1.3x         1.5x         1.5x
    500         2.2x        1.7x        0.8x         1.2x         1.5x
    2000        1.6x        2.4x        0.7x         0.9x         1.0x

Only the scale of 1, with sinks and 64 query and 8 key heads of 64: 1.5x.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from skipdecode import bindings
from skipdecode.graph_passes.conventions import (
    add_constant,
    inputs_by_name,
    int64_constant,
    optional_input,
    required_input,
    static_dim,
)

logger = logging.getLogger(__name__)
_MIN_WIDTH_TIMES_POSITIONS = 262_144  # NH * D * positions from which the matrix kernel is the faster one in a decode step
_MIN_LENGTH_FACTOR = 8  # the pass applies only if max_length is at least 8 times the threshold
_MIN_QUERIES_PER_KEY, _MAX_HEAD_SIZE = 4, 64  # query heads of a key head at least, D at most
_SINKS_INPUT = 11  # index of the operator's input
_UNIT_SCALE = {"scale": ir.AttrFloat32("scale", 1.0)}


class ChooseAttentionKernelPass(ir.passes.InPlacePass):
    """Puts both kernels into an `If`, or moves the scale to the query where the matrix kernel runs in any case. Declines where
    the KV buffer is short. The `If` is only for small key heads shared by many query heads, and never with a window, because
    the matrix kernel reads the positions before the window too.

    Args:
        max_length: the most positions that the KV buffer can have.
    """

    def __init__(self, *, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [
            node
            for node in model.graph
            if node.op_type == "GroupQueryAttention" and _threshold(node) * _MIN_LENGTH_FACTOR <= self.max_length
        ]
        scaled = [node for node in found if _always_runs_matrix_kernel(node) and _scale(node) != 1.0]
        for node in scaled:
            _scale_query(model.graph, node)
        chosen = [node for node in found if _needs_if(node)]
        conditions: dict[int, ir.Value] = {}
        for node in chosen:
            if _threshold(node) not in conditions:
                conditions[_threshold(node)] = _long_step_condition(model.graph, node, _threshold(node))
            _replace_by_if(model.graph, node, conditions[_threshold(node)])
        logger.info("gave %d attention operators two kernels, and %d a scale of 1", len(chosen), len(scaled))
        return ir.passes.PassResult(model, bool(chosen or scaled))


def _always_runs_matrix_kernel(node: ir.Node) -> bool:
    """Whether the operator runs the matrix kernel in any case: it has sinks, a cap, or another layer's keys."""
    has_sinks = optional_input(node, _SINKS_INPUT) is not None
    return has_sinks or "softcap" in node.attributes or len(node.outputs) == 1


def _needs_if(node: ir.Node) -> bool:
    """Whether the matrix kernel is faster at many positions, and not the one that runs already."""
    queries_per_key = node.attributes["num_heads"].as_int() // node.attributes["kv_num_heads"].as_int()
    has_window = "local_window_size" in node.attributes
    return (
        not _always_runs_matrix_kernel(node)
        and not has_window
        and queries_per_key >= _MIN_QUERIES_PER_KEY
        and _head_size(node) <= _MAX_HEAD_SIZE
    )


def _scale(node: ir.Node) -> float:
    return node.attributes["scale"].as_float()


def _head_size(node: ir.Node) -> int:
    return static_dim(required_input(node, 3), 3)  # of the KV buffer


def _width(node: ir.Node, heads: str) -> int:
    return node.attributes[heads].as_int() * _head_size(node)


def _threshold(node: ir.Node) -> int:
    """Positions up to which the dot-product kernel is the faster one."""
    return _MIN_WIDTH_TIMES_POSITIONS // _width(node, "num_heads")


def _long_step_condition(graph: ir.Graph, first: ir.Node, threshold: int) -> ir.Value:
    """Whether there is one new token a row and more than `threshold` positions, bool [1], added before the `first` attention."""
    total = inputs_by_name(graph)[bindings.TOTAL_SEQUENCE_LENGTH]
    tape = Tape()
    limit = tape.op("Constant", [], {"value": ir.tensor(np.array([threshold], np.int32))})
    new_tokens = tape.op("Shape", [first.inputs[0]], {"start": 1, "end": 2})
    is_long_step = tape.op("And", [tape.op("Equal", [new_tokens, int64_constant(tape, 1)]), tape.op("Greater", [total, limit])])
    graph.insert_before(first, tape.nodes)
    return is_long_step


def _replace_by_if(graph: ir.Graph, node: ir.Node, is_long_step: ir.Value) -> None:
    """Replace `node` by an `If` that runs the matrix kernel where there are many positions."""
    heads = node.attributes["num_heads"].as_int()
    sinks = _shared_initializer(graph, "no_sinks", np.full(heads, -np.inf, np.float32))
    scaled_query = _scaled_query(graph, node)
    inputs = [*node.inputs[1:], *(_SINKS_INPUT - len(node.inputs)) * [None], sinks]
    matrix_attention = _copy_with(
        node, [scaled_query.outputs[0] if scaled_query else node.inputs[0], *inputs], {**node.attributes, **_UNIT_SCALE}
    )
    branches = {
        "then_branch": _branch(node, "many", [scaled_query, matrix_attention] if scaled_query else [matrix_attention]),
        "else_branch": _branch(node, "few", [_copy_with(node, node.inputs, node.attributes)]),
    }
    choice = ir.node("If", [is_long_step], branches, num_outputs=len(node.outputs))
    ir.convenience.replace_nodes_and_values(graph, node, [node], [choice], node.outputs, choice.outputs)


def _scale_query(graph: ir.Graph, node: ir.Node) -> None:
    scaled_query = _scaled_query(graph, node)
    assert scaled_query is not None
    graph.insert_before(node, scaled_query)
    node.replace_input_with(0, scaled_query.outputs[0])
    node.attributes.update(_UNIT_SCALE)


def _scaled_query(graph: ir.Graph, node: ir.Node) -> ir.Node | None:
    """The query times the scale; None for a scale of 1. Key and value are left unscaled where they are packed with the query."""
    if _scale(node) == 1.0:
        return None
    others = 2 * _width(node, "kv_num_heads") if node.inputs[1] is None else 0
    factors = np.repeat(np.array([_scale(node), 1.0], np.float32), [_width(node, "num_heads"), others])
    return ir.node("Mul", [node.inputs[0], _shared_initializer(graph, "scale", factors)])


def _shared_initializer(graph: ir.Graph, title: str, array: np.ndarray[tuple[int], np.dtype[np.float32]]) -> ir.Value:
    """An initializer that all layers of a graph share."""
    name = f"{title}_{zlib.crc32(array.tobytes()):08x}"
    if name not in graph.initializers:
        add_constant(graph, ir.Tensor(array, name=name))
    return graph.initializers[name]


def _copy_with(node: ir.Node, inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr]) -> ir.Node:
    return ir.node(node.op_type, inputs, attributes, domain=node.domain, num_outputs=len(node.outputs))


def _branch(node: ir.Node, title: str, nodes: list[ir.Node]) -> ir.Graph:
    """A subgraph of `nodes`, the last of which makes what `node` makes. ONNX wants value names that are unique in the model."""
    for number, value in enumerate(value for each in nodes for value in each.outputs):
        value.name = f"{node.outputs[0].name}.{title}.{number}"
    for old, new in zip(node.outputs, nodes[-1].outputs, strict=True):
        new.shape, new.type = old.shape, old.type
    return ir.Graph([], nodes[-1].outputs, nodes=nodes, name=title)
