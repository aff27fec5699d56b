"""Precompute a rotary embedding as the tables of cosines and sines, one row per position, that GroupQueryAttention rotates by.

RotaryEmbedding(x, Cos(position * frequencies) * factor, Sin(position * frequencies) * factor)
-> cos_cache, sin_cache [max_length, rotary D / 2]
"""

from __future__ import annotations

import zlib

import numpy as np
import onnx_ir as ir

from skipdecode.graph_passes.conventions import add_constant, producer, static_dim


def rotary_table(graph: ir.Graph, rotated: list[ir.Value], max_length: int) -> list[ir.Value] | None:
    """The initializers cos_cache and sin_cache, shared by layers with the same frequencies.

    None where rotation must stay outside the operator, which rotates query and key alike and by constant frequencies.

    Args:
        rotated: the query, and the new key where there is one.
    """
    nodes = [value.producer() for value in rotated]
    first = nodes[0]
    if first is None or any(
        node is None or node.op_type != "RotaryEmbedding" or not _rotate_alike(node, first) for node in nodes
    ):
        return None
    (cos, cos_factor), (sin, sin_factor) = (_table_and_factor(first.inputs[index]) for index in (1, 2))
    if cos is None or sin is None or (cos.op_type, sin.op_type) != ("Cos", "Sin") or cos.inputs[0] is not sin.inputs[0]:
        return None
    angles = producer(cos.inputs[0]) if cos_factor == sin_factor else None
    frequencies = next((v for v in angles.inputs if v is not None and v.const_value is not None), None) if angles else None
    if frequencies is None or angles is None or angles.op_type != "Mul":
        return None
    assert frequencies.const_value is not None
    values = frequencies.const_value.numpy().astype(np.float32).reshape(1, -1)
    if values.shape[1] % 8 or static_dim(rotated[0], 3) % 16:  # limits of the operator
        return None
    angles_by_position = np.arange(max_length, dtype=np.float32)[:, None] * values
    tables, kind = [], rotated[0].dtype or ir.DataType.FLOAT
    for prefix, function in (("cos_cache", np.cos), ("sin_cache", np.sin)):
        # layers of one graph may have different frequencies (Gemma 3)
        name = f"{prefix}_{zlib.crc32(np.append(values, np.float32(cos_factor)).tobytes()):08x}"
        if name not in graph.initializers:
            table = function(angles_by_position) * np.float32(cos_factor)
            add_constant(graph, ir.Tensor(table.astype(kind.numpy()), dtype=kind, name=name))  # must be the query's dtype
        tables.append(graph.initializers[name])
    return tables


def _rotate_alike(one: ir.Node, other: ir.Node) -> bool:
    """Whether two rotary embeddings turn the same pairs of a head's numbers by the same angles."""
    settings = [[node.attributes.get_int(name, 0) for name in ("interleaved", "rotary_embedding_dim")] for node in (one, other)]
    tables = all(_is_same_table(one.inputs[index], other.inputs[index]) for index in (1, 2))
    return tables and one.inputs[3:] == other.inputs[3:] and settings[0] == settings[1]


def _is_same_table(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Whether two values are the same cosines or sines. Narrow graphs compute them once per reader, from the same angles."""
    (table, factor), (other_table, other_factor) = _table_and_factor(one), _table_and_factor(other)
    if table is None or other_table is None:
        return one is other
    return (table.op_type, [*table.inputs], factor) == (other_table.op_type, [*other_table.inputs], other_factor)


def _table_and_factor(value: ir.Value | None) -> tuple[ir.Node | None, float]:
    """The node that produces `value`, looking through casts (narrow graphs compute tables in fp32), and the factor (yarn's)."""
    node, factor = producer(value), 1.0
    while node is not None and node.op_type in ("Cast", "Mul"):
        if node.op_type == "Mul":
            number = node.inputs[1].const_value if node.inputs[1] is not None else None
            if number is None or number.size != 1:
                return None, factor
            factor *= float(number.numpy().item())
        node = producer(node.inputs[0])
    return node, factor
