"""Write out attention that TensorRT has no fused kernel for as primitive operators.

    Attention(query, keys, values, mask, softcap=c)
    -> MatMul(Softmax(Where(mask, c * Tanh(MatMul(query * scale, keys^T) / c), -inf)), values)

Why: TensorRT's parser takes no cap (Gemma 2) and no output but the first (attention sinks need the scores). It has no kernel for
- fewer than 4 heads,
- heads of fewer than 16 or more than 256 numbers (Gemma 4),
- a step's single token with some 24,000 slots or more (but see `turn_queries_into_tokens`),
- a second attention to the same keys in one plan (layers that read another layer's keys): TensorRT-RTX 1.7.1's builder crashes
  with signal 11.

Queries that share keys become rows of one product, so that no key is duplicated. The softmax is in fp32, and so is
what sinks leave of it. TensorRT-RTX 1.7.1 copies all slots once for each of the two products.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from skipdecode.graph_passes.conventions import int64_constant, required_input, single_consumer, static_dim
from skipdecode.graph_passes.take_over import take_over
from skipdecode.graph_passes.turn_queries_into_tokens import MIN_HEADS, exceeds_single_token_kernel, num_heads_to_merge

_SUPPORTED_HEAD_SIZES = range(16, 257)  # those that TensorRT-RTX 1.7.1 has fused attention for: 8, 264 and more do not build
_SUPPORTED_ATTRIBUTES = {"scale", "softcap", "qk_matmul_output_mode"}


class WriteOutAttentionPass(ir.passes.InPlacePass):
    """Writes out attention without a fused kernel. Declines attention that has a kernel. Slots must be static.

    Args:
        slots: number of slots of each layer's KV buffer in this graph.
    """

    def __init__(self, *, slots: int) -> None:
        super().__init__()
        self.slots = slots

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = attention_without_kernel(model.graph, self.slots)
        for node in found:
            _WrittenOut(model.graph, node).write()
        return ir.passes.PassResult(model, bool(found))


def attention_without_kernel(graph: ir.Graph, slots: int) -> list[ir.Node]:
    """The attention nodes without a kernel for KV buffers of `slots` slots. The graph's own slots may still be dynamic."""
    served_keys: set[ir.Value | None] = set()
    found = []
    for node in (node for node in graph if node.op_type == "Attention"):
        if _has_kernel(node, slots) and node.inputs[1] not in served_keys:
            served_keys.add(node.inputs[1])
        else:
            found.append(node)
    return found


def _has_kernel(node: ir.Node, slots: int) -> bool:
    is_plain = len(node.outputs) == 1 and not node.attributes.get_float("softcap", 0.0)
    heads, size = (static_dim(required_input(node), axis) for axis in (1, 3))
    has_supported_sizes = size in _SUPPORTED_HEAD_SIZES and heads >= MIN_HEADS
    return is_plain and has_supported_sizes and (not exceeds_single_token_kernel(node, slots) or num_heads_to_merge(node) > 1)


class _WrittenOut:
    """Writes out one attention: query [B,NH,S,D], keys and values [B,KVH,C,D]."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        assert {*node.attributes} <= _SUPPORTED_ATTRIBUTES, f"attention with {[*node.attributes]}"
        self._graph, self._node, self._tape = graph, node, Tape()
        self._query, self._keys, self._values, self._mask = (required_input(node, index) for index in range(4))
        self._heads, self._kv_heads = static_dim(self._query, 1), static_dim(self._keys, 1)

    def write(self) -> None:
        scores, kind = self._scores(), self._query.dtype
        assert kind is not None
        shares = self._cast(self._tape.op("Softmax", [scores], {"axis": -1}), kind)
        rows = self._tape.op("MatMul", [self._group_by_kv_head(shares, static_dim(self._keys, 2)), self._values])
        attended = self._split_by_query_head(rows, static_dim(self._query, 3))
        self._graph.insert_before(self._node, self._tape.nodes)
        take_over(self._node.outputs[0], attended)
        if len(self._node.outputs) > 1:
            assert self._node.attributes["qk_matmul_output_mode"].as_int() == 2, "scores that are not those of the softmax"
            self._widen_sinks(scores)
        self._graph.remove(self._node, safe=True)

    def _widen_sinks(self, scores: ir.Value) -> None:
        """Compute Sigmoid(ReduceLogSumExp(scores) - sinks), what sinks leave of the softmax, from the scores in fp32.

        The sum's logarithm may be as large as the scores: bf16 would round 20 to eighths, and the share by up to 2 %.
        """
        logsumexp = single_consumer(self._node.outputs[3], "ReduceLogSumExp")
        difference = single_consumer(logsumexp.outputs[0], "Sub")
        sigmoid = single_consumer(difference.outputs[0], "Sigmoid")
        share, self._tape = sigmoid.outputs[0], Tape()
        assert share.dtype is not None
        total = self._tape.op("ReduceLogSumExp", [scores, required_input(logsumexp, 1)], logsumexp.attributes)
        sinks = self._cast(required_input(difference, 1), ir.DataType.FLOAT)
        wide_share = self._tape.op("Sigmoid", [self._tape.op("Sub", [total, sinks])])
        narrow_share = self._cast(wide_share, share.dtype)
        self._graph.insert_before(sigmoid, self._tape.nodes)
        take_over(share, narrow_share)
        for node in (sigmoid, difference, logsumexp):
            self._graph.remove(node, safe=True)

    def _scores(self) -> ir.Value:
        """The scaled, capped and masked scores, [B,NH,S,C] in fp32."""
        op = self._tape.op
        scale, cap = self._node.attributes["scale"].as_float(), self._node.attributes.get_float("softcap", 0.0)
        assert self._query.dtype is not None
        scaled = op("Mul", [self._query, self._constant(scale, self._query.dtype)])
        transposed_keys = op("Transpose", [self._keys], {"perm": [0, 1, 3, 2]})
        products = op("MatMul", [self._group_by_kv_head(scaled, static_dim(self._query, 3)), transposed_keys])
        scores = self._cast(self._split_by_query_head(products, static_dim(self._keys, 2)), ir.DataType.FLOAT)
        if cap:
            limit = self._constant(cap, ir.DataType.FLOAT)
            scores = op("Mul", [op("Tanh", [op("Div", [scores, limit])]), limit])
        if self._mask.dtype == ir.DataType.BOOL:
            return op("Where", [self._mask, scores, self._constant(-np.inf, ir.DataType.FLOAT)])
        return op("Add", [scores, self._cast(self._mask, ir.DataType.FLOAT)])

    def _group_by_kv_head(self, value: ir.Value, size: int) -> ir.Value:
        """[B,NH,S,size] -> [B,KVH,NH/KVH*S,size]."""
        return self._reshaped(value, self._kv_heads, size)

    def _split_by_query_head(self, value: ir.Value, size: int) -> ir.Value:
        """[B,KVH,NH/KVH*S,size] -> [B,NH,S,size]."""
        return self._reshaped(value, self._heads, size)

    def _reshaped(self, value: ir.Value, heads: int, size: int) -> ir.Value:
        return self._tape.op("Reshape", [value, int64_constant(self._tape, 0, heads, -1, size)])

    def _constant(self, number: float, dtype: ir.DataType) -> ir.Value:
        return self._tape.op("Constant", [], {"value": ir.tensor(np.array(number, dtype.numpy()))})

    def _cast(self, value: ir.Value, to: ir.DataType) -> ir.Value:
        return self._tape.op("Cast", [value], {"to": to})
