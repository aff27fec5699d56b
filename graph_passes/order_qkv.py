"""Put the columns of a weight that yields query, key and value in the order of GroupQueryAttention's packed input.

    rows = MatMul(x, W) + b;  GroupQueryAttention(Reshape, Split, Squeeze, Slice, .. of rows, for query, key and value, ..)
    -> GroupQueryAttention(MatMul(x, W') + b', -, -, ..)      W', b': columns of W and b reordered; `rows` itself if in order

GPT-NeoX, BLOOM and Falcon store the columns by head, CodeGen by TPU core; GPT-2 and MPT have all queries first.
Measured: a decode step at batch 1 in int4, interleaved runs (AMD EPYC, 2 cores): GPT-NeoX 12 x 768 1.06x and 1.08x as fast,
24 x 1024 1.03x and 1.01x, Falcon 8 x 2048 1.02x and 1.01x.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from skipdecode.graph_passes.pack_qkv import feed_packed_rows
from skipdecode.graph_passes.projection import find_projection, multiply, reorder_parameter

Order = np.ndarray[tuple[int], np.dtype[np.int64]]
_REARRANGING_OPS = ("Gather", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")
_BATCH, _TOKENS = 2, 3


class OrderQKVPass(ir.passes.InPlacePass):
    """Feeds each attention the rows of one product, in packed order.

    Declines where the three are not all columns of one product, or the product needs reordering and has several readers.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return feed_packed_rows(model, _ordered_rows)


def _ordered_rows(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Query, key and value side by side; None where they are not rearranged from the rows of one value."""
    parts = [value for value in node.inputs[:3] if value is not None]
    rows = _rearranged_source(parts[0])
    if any(_rearranged_source(part) is not rows for part in parts) or rows.shape is None or len(rows.shape) != 3:
        return None
    order = _column_order(graph, rows, parts)
    if order is None:
        return None
    if np.array_equal(order, np.arange(len(order))):
        return rows
    found = find_projection(rows)
    if found is None or found.factor != 1.0:
        return None
    weight = reorder_parameter(graph, found.weight, order, 0 if found.transposed else 1)
    bias = reorder_parameter(graph, found.bias, order, 0) if found.bias is not None else None
    return multiply(graph, node, found.source, weight, found.transposed, bias)


def _rearranged_source(value: ir.Value) -> ir.Value:
    """The value whose numbers `value` rearranges without changing any."""
    node = value.producer()
    while node is not None and node.op_type in _REARRANGING_OPS and node.domain == "" and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _column_order(graph: ir.Graph, rows: ir.Value, parts: list[ir.Value]) -> Order | None:
    """For each column of the concatenated parts, its column in `rows` [B,S,W]; None if this is not a permutation of them all."""
    width = rows.shape[2] if rows.shape is not None else None
    if not isinstance(width, int):
        return None
    model = ir.Model(ir.convenience.extract(graph, [rows], parts), ir_version=10)
    numbers = np.arange(_BATCH * _TOKENS * width, dtype=np.float32).reshape(_BATCH, _TOKENS, width)
    rearranged = ReferenceEvaluator(ir.to_proto(model)).run(None, {str(rows.name): numbers})
    if any(part.shape[:2] != (_BATCH, _TOKENS) for part in rearranged):
        return None
    columns = np.concatenate(rearranged, axis=2).astype(np.int64) - numbers[:, :, :1].astype(np.int64)
    order: Order = columns[0, 0]
    is_permutation = np.array_equal(np.sort(order), np.arange(width)) and (columns == order).all()
    return order if is_permutation else None
