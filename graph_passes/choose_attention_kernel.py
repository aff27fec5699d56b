"""GroupQueryAttention's quicker kernel where each row has one new token and many to attend to.

    GroupQueryAttention(query, .., scale)
    -> If(one new token, more positions than a few):  GroupQueryAttention(query * scale, .., head_sink = -inf, scale = 1)
       else:                                          GroupQueryAttention(query, .., scale)

    GroupQueryAttention(query, .., sinks or a cap, scale)  ->  GroupQueryAttention(query * scale, .., scale = 1)

Why: for one new token ONNX Runtime 1.32 has two kernels. Its own choice reads each key by dot products; the other one multiplies
matrices, and is taken where there are sinks (one of -inf takes nothing). MLAS packs a matrix before it multiplies a single row by
it, unless the factor is 1. The matrix kernel is the quicker one for a key's second query and those after it, not for the first.

A decode step in int4 at batch 1, 16 layers of 1024 with 16 query and 4 key heads of 64, in one segment, four pairs of bundles
that were exported one after another, taking turns in one process (AMD EPYC with AVX-512, 2 cores): among 1900 positions 1.14x
to 1.19x as fast, among 700 1.06x and 1.10x, among 400 and 500 0.99x to 1.06x; the `If` costs 6 to 20 us a layer, so that among
32 and 100 it is 0.95x to 0.98x. (Bundles of different age differ by up to a tenth: the pages of their files lie differently.)

The operator alone, 8 layers taking turns, among 100, 500 and 2000 positions: 16 and 4 heads of 64 1.5x, 2.2x, 1.6x; 32 and 8
1.7x, 1.7x, 2.4x; of 128, 16 and 8 1.3x, 0.8x, 0.7x, 32 and 8 1.5x, 1.2x, 0.9x, 28 and 4 1.5x, 1.5x, 1.0x. A scale of 1 alone,
64 and 8 heads of 64 with sinks: 1.5x.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from skipdecode import bindings
from skipdecode.graph_passes.conventions import add_constant, constant, inputs_by_name, optional, required, static_dim

logger = logging.getLogger(__name__)
_WORTH = 262_144  # numbers of a query times positions from which the matrix kernel is the quicker one in a step
_SHARE = 8  # of the positions that the KV buffer may have, one in so many may be fewer than that
_QUERIES, _HEAD_SIZE = 4, 64  # of a key at least, of a head at most
_SINKS = 11  # the operator's input


class ChooseAttentionKernelPass(ir.passes.InPlacePass):
    """Declines where few positions fit. Two kernels are for small heads whose keys many queries read, without a window, as the
    matrix kernel reads what lies before it too.

    Args:
        max_length: positions that the KV buffer has at most.
    """

    def __init__(self, *, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type == "GroupQueryAttention" and _few(node) * _SHARE <= self.max_length]
        scaled = [node for node in found if _takes_matrix_kernel(node) and _scale(node) != 1.0]
        for node in scaled:
            _scale_before(model.graph, node)
        chosen = [node for node in found if _gains_by_choice(node)]
        many: dict[int, ir.Value] = {}
        for node in chosen:
            if _few(node) not in many:
                many[_few(node)] = _many(model.graph, node, _few(node))
            _choose(model.graph, node, many[_few(node)])
        logger.info("%d attentions have two kernels, %d a scale of 1", len(chosen), len(scaled))
        return ir.passes.PassResult(model, bool(chosen or scaled))


def _takes_matrix_kernel(node: ir.Node) -> bool:
    """Whether the operator takes it by itself: sinks, a cap, keys of another layer."""
    sinks = optional(node, _SINKS) is not None
    return sinks or "softcap" in node.attributes or len(node.outputs) == 1


def _gains_by_choice(node: ir.Node) -> bool:
    """Whether the matrix kernel is quicker among many positions, and not taken already."""
    queries = node.attributes["num_heads"].as_int() // node.attributes["kv_num_heads"].as_int()
    windowed = "local_window_size" in node.attributes
    return not _takes_matrix_kernel(node) and not windowed and queries >= _QUERIES and _head_size(node) <= _HEAD_SIZE


def _scale(node: ir.Node) -> float:
    return node.attributes["scale"].as_float()


def _head_size(node: ir.Node) -> int:
    return static_dim(required(node, 3), 3)  # of the KV buffer


def _width(node: ir.Node, heads: str) -> int:
    return node.attributes[heads].as_int() * _head_size(node)


def _few(node: ir.Node) -> int:
    """Positions up to which the kernel by dot products is the quicker one."""
    return _WORTH // _width(node, "num_heads")


def _many(graph: ir.Graph, first: ir.Node, few: int) -> ir.Value:
    """Whether there is one new token a row, and more than `few` positions: bool [1], made before the `first` attention."""
    total = inputs_by_name(graph)[bindings.TOTAL_SEQUENCE_LENGTH]
    tape = Tape()
    limit = tape.op("Constant", [], {"value": ir.tensor(np.array([few], np.int32))})
    new_tokens = tape.op("Shape", [first.inputs[0]], {"start": 1, "end": 2})
    many = tape.op("And", [tape.op("Equal", [new_tokens, constant(tape, 1)]), tape.op("Greater", [total, limit])])
    graph.insert_before(first, tape.nodes)
    return many


def _choose(graph: ir.Graph, node: ir.Node, many: ir.Value) -> None:
    """`node` becomes an `If`, with the matrix kernel where there are many positions."""
    heads = node.attributes["num_heads"].as_int()
    sinks = _shared(graph, "no_sinks", np.full(heads, -np.inf, np.float32))
    scaled = _scaled(graph, node)
    inputs = [*node.inputs[1:], *(_SINKS - len(node.inputs)) * [None], sinks]
    by_matrices = _again(node, [scaled.outputs[0] if scaled else node.inputs[0], *inputs], {**node.attributes, **_ONE})
    branches = {
        "then_branch": _branch(node, "many", [scaled, by_matrices] if scaled else [by_matrices]),
        "else_branch": _branch(node, "few", [_again(node, node.inputs, node.attributes)]),
    }
    choice = ir.node("If", [many], branches, num_outputs=len(node.outputs))
    ir.convenience.replace_nodes_and_values(graph, node, [node], [choice], node.outputs, choice.outputs)


def _scale_before(graph: ir.Graph, node: ir.Node) -> None:
    scaled = _scaled(graph, node)
    assert scaled is not None
    graph.insert_before(node, scaled)
    node.replace_input_with(0, scaled.outputs[0])
    node.attributes.update(_ONE)


_ONE = {"scale": ir.AttrFloat32("scale", 1.0)}


def _scaled(graph: ir.Graph, node: ir.Node) -> ir.Node | None:
    """The query times the scale, beside key and value as they are where rows hold all three; None for a scale of 1."""
    if _scale(node) == 1.0:
        return None
    others = 2 * _width(node, "kv_num_heads") if node.inputs[1] is None else 0
    factors = np.repeat(np.array([_scale(node), 1.0], np.float32), [_width(node, "num_heads"), others])
    return ir.node("Mul", [node.inputs[0], _shared(graph, "scale", factors)])


def _shared(graph: ir.Graph, title: str, array: np.ndarray[tuple[int], np.dtype[np.float32]]) -> ir.Value:
    """A constant that the layers of a graph have once."""
    name = f"{title}_{zlib.crc32(array.tobytes()):08x}"
    if name not in graph.initializers:
        add_constant(graph, ir.Tensor(array, name=name))
    return graph.initializers[name]


def _again(node: ir.Node, inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr]) -> ir.Node:
    return ir.node(node.op_type, inputs, attributes, domain=node.domain, num_outputs=len(node.outputs))


def _branch(node: ir.Node, title: str, nodes: list[ir.Node]) -> ir.Graph:
    """A graph of `nodes`, the last of which gives what `node` gives; its values' names are its own, as ONNX wants."""
    for number, value in enumerate(value for each in nodes for value in each.outputs):
        value.name = f"{node.outputs[0].name}.{title}.{number}"
    for old, new in zip(node.outputs, nodes[-1].outputs, strict=True):
        new.shape, new.type = old.shape, old.type
    return ir.Graph([], nodes[-1].outputs, nodes=nodes, name=title)
