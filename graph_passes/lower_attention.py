"""Lower `TensorScatter` + `Attention` to ONNX Runtime's GroupQueryAttention, which updates the KV buffer in place.

    present = TensorScatter(past, new, start);  Attention(query, present_key, present_value, visible)
    -> GroupQueryAttention(query, key, value, past_key, past_value, seqlens_k, total_sequence_length, cos_cache, sin_cache)

    Attention(..) * Sigmoid(ReduceLogSumExp(its scores) - sinks)  ->  the same, with `head_sink`
    Attention(.., Where(visible, bias of each slot, -inf))        ->  the same, with `attention_bias`, and `seqlens_k` as each
                                                                      row's last position (`slot_biases`)
    Attention(query, keys and values that another layer wrote)    ->  the same, without a new key and value

Why: on a CPU opset 24's Attention costs what the KV buffer could hold (3.1 ms at 2048 slots, however many are valid),
GroupQueryAttention what it does hold (0.03 ms at 16 valid slots). A rotary embedding of query and key moves inside as a table of
cosines and sines. A mask that shows a window of the last tokens becomes the operator's `local_window_size`.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from skipdecode import bindings
from skipdecode.graph_passes.conventions import (
    MS_DOMAIN,
    inputs_by_name,
    int64_constant_node,
    required_input,
    single_consumer,
    static_dim,
)
from skipdecode.graph_passes.rotary_table import rotary_table
from skipdecode.graph_passes.slot_biases import last_slots, slot_biases
from skipdecode.graph_passes.take_over import take_over
from skipdecode.graph_passes.tokens_first import TokensFirst

logger = logging.getLogger(__name__)


class LowerAttentionPass(ir.passes.InPlacePass):
    """Lowers each Attention, with the TensorScatters before it, to one GroupQueryAttention.

    Leaves a rotary embedding outside where query and key are not rotated alike, or not from constant frequencies. The layer's KV
    inputs keep their names. The graph gets two more inputs (`bindings`): `total_sequence_length`, and `seqlens_k` unless all its
    layers have biases.

    Args:
        max_length: positions in the rotary table.
    """

    def __init__(self, *, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type == "Attention" and node.domain == ""]
        for node in found:
            _lower(model.graph, node, self.max_length)
        if found:
            model.graph.opset_imports[MS_DOMAIN] = 1
            RemoveUnusedNodesPass()(model)
        logger.info("lowered %d attention operators", len(found))
        return ir.passes.PassResult(model, bool(found))

    def ensures(self, model: ir.Model) -> None:
        left = [node.op_type for node in model.graph if node.op_type in ("Attention", "TensorScatter") and node.domain == ""]
        if left:
            raise ir.passes.PostconditionError(f"operators that were not lowered: {left}")


def _lower(graph: ir.Graph, node: ir.Node, max_length: int) -> None:
    query, *present = (required_input(node, i) for i in range(3))
    new_key_and_value = _new_key_and_value(*present)
    num_heads, kv_heads, head_size = static_dim(query, 1), static_dim(present[0], 1), static_dim(present[0], 3)
    attended, sinks = _result_and_sinks(node)
    visible, bias = _visible_and_bias(required_input(node, 3))
    transpose = single_consumer(attended, "Transpose")
    (reshape_or_slice,) = transpose.outputs[0].consumers()
    heads = [query, *new_key_and_value]
    rotary_tables = rotary_table(graph, heads[:2], max_length)
    attributes = {"num_heads": num_heads, "kv_num_heads": kv_heads, **_score_attributes(node, visible, max_length)}
    attributes |= {"do_rotary": int(rotary_tables is not None), "rotary_interleaved": 0}
    if rotary_tables is not None:
        attributes["rotary_interleaved"] = _producer_of_type(query, "RotaryEmbedding").attributes["interleaved"].as_int()
        heads[:2] = [required_input(_producer_of_type(value, "RotaryEmbedding")) for value in heads[:2]]
    tokens_first = TokensFirst(graph, reshape_or_slice)
    rows = [tokens_first.rows(value) for value in heads]
    if not new_key_and_value:
        rows += 2 * [_empty_rows(graph, reshape_or_slice, rows[0], kv_heads * head_size)]
    seqlens = last_slots(graph, reshape_or_slice) if bias is not None else _length_input(graph, bindings.SEQLENS_K, "B")
    lengths = [seqlens, _length_input(graph, bindings.TOTAL_SEQUENCE_LENGTH, 1)]
    if bias is not None:
        bias = slot_biases(graph, reshape_or_slice, bias, lengths[1], max_length)
    past = [required_input(_producer_of_type(value, "TensorScatter")) for value in present] if new_key_and_value else present
    inputs = [*rows, *past, *lengths, *_optional_inputs(rotary_tables, bias, sinks)]
    lowered = ir.node("GroupQueryAttention", inputs, attributes, domain=MS_DOMAIN, num_outputs=3 if new_key_and_value else 1)
    graph.insert_before(reshape_or_slice, lowered)
    for old, present_output in zip(present, lowered.outputs[1:], strict=False):  # no outputs for another layer's key and value
        take_over(old, present_output)
    if reshape_or_slice.op_type == "Reshape":
        take_over(reshape_or_slice.outputs[0], lowered.outputs[0])
    else:  # `reshape_or_slice` takes a part of each head, because values are narrower than keys
        take_over(transpose.outputs[0], _reshaped(graph, reshape_or_slice, lowered.outputs[0], [0, 0, num_heads, head_size]))


def _new_key_and_value(present_key: ir.Value, present_value: ir.Value) -> list[ir.Value]:
    """The key and value that the layer writes, each [B,KVH,S,D]; empty where it reads slots that another layer wrote."""
    new = []
    for value in (present_key, present_value):
        node = value.producer()
        if node is not None and node.op_type == "TensorScatter":
            new.append(required_input(node, 1))
        else:
            of_other_layer = str(value.name).startswith(bindings.PRESENT) and (
                node is None or node.op_type == "GroupQueryAttention"
            )
            assert of_other_layer, f"{value.name} is not made by TensorScatter, nor of another layer"
    return new


def _producer_of_type(value: ir.Value, op_type: str) -> ir.Node:
    node = value.producer()
    assert node is not None and node.op_type == op_type, f"{value.name} is not made by {op_type}"
    return node


def _result_and_sinks(attention: ir.Node) -> tuple[ir.Value, ir.Value | None]:
    """The attention's result with sinks applied, and the sinks [NH], which take a share of its softmax; None: it has no sinks."""
    if len(attention.outputs) < 4:
        return attention.outputs[0], None
    assert attention.attributes["qk_matmul_output_mode"].as_int() == 2, "scores that are not those of the softmax"
    difference = single_consumer(single_consumer(attention.outputs[3], "ReduceLogSumExp").outputs[0], "Sub")
    scaled_result = single_consumer(single_consumer(difference.outputs[0], "Sigmoid").outputs[0], "Mul")
    assert attention.outputs[0] in scaled_result.inputs, "a share of something else"
    return scaled_result.outputs[0], required_input(_producer_of_type(required_input(difference, 1), "Reshape"), 0)


def _visible_and_bias(mask: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """The slots that each query sees by a mask, bool [B,1,S,C], and the bias of their scores [B,NH,S,C]; None: no bias."""
    node = mask.producer()
    if node is None or node.op_type != "Where":
        return mask, None
    hidden = required_input(node, 2).const_value
    assert hidden is not None and (hidden.numpy() == -np.inf).all(), "slots that are not seen have scores"
    return required_input(node, 0), required_input(node, 1)


def _optional_inputs(tables: list[ir.Value] | None, bias: ir.Value | None, sinks: ir.Value | None) -> list[ir.Value | None]:
    """The operator's inputs from index 7 on: cos_cache, sin_cache, position_ids, attention_bias, head_sink."""
    inputs = [*(tables or (None, None)), None, bias, sinks]
    while inputs and inputs[-1] is None:
        inputs.pop()
    return inputs


def _score_attributes(attention: ir.Node, visible: ir.Value, max_length: int) -> dict[str, int | float]:
    """Scale, cap and window as attributes of the operator."""
    attributes: dict[str, int | float] = {
        name: attention.attributes[name].as_float() for name in ("scale", "softcap") if name in attention.attributes
    }
    window = _window(visible)
    if window is not None and window < max_length:
        attributes["local_window_size"] = window
    return attributes


def _window(visible: ir.Value) -> int | None:
    """The window of a mask `slot <= position and slot > position - window`, counting the query's own slot; None: no window."""
    mask = visible.producer()
    conditions = required_input(mask, 0).producer() if mask is not None and mask.op_type == "Unsqueeze" else None
    if conditions is None or conditions.op_type != "And":
        return None
    oldest = _producer_of_type(required_input(_producer_of_type(required_input(conditions, 1), "Greater"), 1), "Sub")
    window = required_input(oldest, 1).const_value
    assert window is not None, "a window that is not constant"
    return int(window.numpy().item())


def _length_input(graph: ir.Graph, name: str, size: str | int) -> ir.Value:
    """The graph's input `name`, int32 [size], added if missing."""
    existing = inputs_by_name(graph).get(name)
    if existing is not None:
        return existing
    added = ir.Value(name=name, shape=ir.Shape([size]), type=ir.TensorType(ir.DataType.INT32))
    graph.inputs.append(added)
    return added


def _empty_rows(graph: ir.Graph, before: ir.Node, rows: ir.Value, width: int) -> ir.Value:
    """[B,S,W] -> [B,0,width], an empty key or value, which tells the operator that its past already holds the new tokens."""
    starts, ends, axes = int64_constant_node(0, 0), int64_constant_node(0, width), int64_constant_node(1, 2)
    empty = ir.node("Slice", [rows, starts.outputs[0], ends.outputs[0], axes.outputs[0]])
    graph.insert_before(before, [starts, ends, axes, empty])
    return empty.outputs[0]


def _reshaped(graph: ir.Graph, before: ir.Node, value: ir.Value, sizes: list[int]) -> ir.Value:
    """`value` reshaped to `sizes`, where 0 keeps a dimension."""
    shape = int64_constant_node(*sizes)
    reshape = ir.node("Reshape", [value, shape.outputs[0]])
    graph.insert_before(before, [shape, reshape])
    return reshape.outputs[0]
