"""Turn query heads that share keys into further tokens of one head, where a step has more slots than its kernel takes.

    Attention(query [B,NH,S,D], keys [B,KVH,C,D], values, mask [B,1,S,C])
    -> Reshape(Attention(Reshape(query, [B,NH/n,n*S,D]), keys, values, Concat(n of mask)), [B,NH,S,D])

Why: TensorRT-RTX 1.7.1's kernel for a single token must fit slots and head size in 48 KiB. Its kernel for several tokens has no
such limit, and takes a step whose heads are tokens. The slots are copied in front of it, but only once per remaining head:
32 heads of 65,536 slots take 1 GiB of scratch memory, where written out (`write_out_attention`) they would take 4 GiB.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from skipdecode.graph_passes.conventions import int64_constant, producer, required_input, static_dim

# query heads for which TensorRT-RTX 1.7.1 has a kernel: 1, 2 and 3 do not build, whatever the head size and number of key heads
MIN_HEADS = 4
# the most that TensorRT-RTX 1.7.1's single-token kernel takes: 8 more do not build, whatever the heads and the GPU
_MAX_SLOTS_PLUS_HEAD_SIZE = 24576


class TurnQueriesIntoTokensPass(ir.passes.InPlacePass):
    """Merges query heads that share keys where a step has too many slots. Declines attention that the single-token kernel takes.

    Runs after WriteOutAttentionPass, because it does not recognise attention that no kernel takes, whatever the slots
    (with a cap, say, or further outputs).

    Args:
        slots: number of slots of each layer's KV buffer in this graph.
    """

    def __init__(self, *, slots: int) -> None:
        super().__init__()
        self.slots = slots

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        long = [node for node in model.graph if node.op_type == "Attention" and exceeds_single_token_kernel(node, self.slots)]
        found = [(node, count) for node in long if (count := num_heads_to_merge(node)) > 1]
        for node, count in found:
            _merge_heads(model.graph, node, count)
        return ir.passes.PassResult(model, bool(found))


def exceeds_single_token_kernel(node: ir.Node, slots: int) -> bool:
    """Whether a step has one token per head and more slots than the single-token kernel takes."""
    return slots + static_dim(required_input(node), 3) > _MAX_SLOTS_PLUS_HEAD_SIZE and not _is_already_merged(node)


def _is_already_merged(node: ir.Node) -> bool:
    masks = producer(required_input(node, 3))
    return masks is not None and masks.op_type == "Concat" and len(masks.inputs) > 1 and len({*masks.inputs}) == 1


def num_heads_to_merge(node: ir.Node) -> int:
    """How many heads that share keys become tokens of one head; 1 if none do."""
    if static_dim(required_input(node, 3), 1) != 1:  # heads have masks of their own
        return 1
    heads, kv_heads = (static_dim(required_input(node, index), 1) for index in range(2))
    group = heads // kv_heads
    return max(count for count in range(1, group + 1) if group % count == 0 and (count == 1 or heads // count >= MIN_HEADS))


def _merge_heads(graph: ir.Graph, node: ir.Node, count: int) -> None:
    tape, query, mask = Tape(), required_input(node), required_input(node, 3)
    heads, size = (static_dim(query, axis) for axis in (1, 3))
    tokens = tape.op(
        "Reshape", [query, int64_constant(tape, 0, heads // count, -1, size)], output=_value_like(query, heads // count)
    )
    masks = tape.op("Concat", [mask] * count, {"axis": 2}, output=_value_like(mask, 1))
    attended = _value_like(node.outputs[0], heads // count)
    rows = tape.op("Attention", [tokens, *node.inputs[1:3], masks], node.attributes, output=attended)
    made = tape.op("Reshape", [rows, int64_constant(tape, 0, heads, -1, static_dim(required_input(node, 2), 3))])
    ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [made])


def _value_like(like: ir.Value, heads: int) -> ir.Value:
    """A new value like `like` [B,N,S,X], but with `heads` heads and more tokens: [B,heads,?,X]."""
    assert like.shape is not None
    return ir.Value(shape=ir.Shape([like.shape[0], heads, None, like.shape[3]]), type=like.type)
