"""Write out linear attention as matrix products over all tokens of a pass, for TensorRT, which lacks the operator.

    LinearAttention(q, k, v [B,S,H*D], past [B,H,DK,DV], g [B,S,H][, beta [B,S,H]])
    ->  out     = scale ((e^c q) past + (q k^T * decays) u)
        present = e^(c_S) past + (decays[S] k)^T u

where c_t is the sum of g up to token t, and decays[t,i] is e^(c_t - c_i) for i <= t, else 0. c_t - c_i is summed from i + 1 to t,
because the difference of two long sums would be mostly rounding where a token forgets much. With the rule `gated` u is v
(arXiv 2405.21060, section 5). With `gated_delta` u is what each token changes, which depends on the tokens before it
(arXiv 2412.06464, section 3.3):

    (1 + A) u = beta (v - (e^c k) past),    A[t,i] = beta_t decays[t,i] k_t k_i for i < t

1 + A is inverted block by block. For two tokens the inverse is 1 - A; then pairs of blocks are merged, since
[[X, 0], [-Y C X, Y]] is the inverse of [[1/X, 0], [C, 1/Y]]. (In (1 - A)(1 + A^2)(1 + A^4).., which is equal on paper, the terms
grow too large to cancel.) Blocks are masks, so that a pass may have any smaller number of tokens.

A step has one token. TensorRT-RTX 1.7.1 builds steps and prompts separately, and leaves the inverse out of steps. A Scan over the
tokens, as the operator is specified, would become a loop in every step with its trips counted by the host. An If around the Scan
does not build.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from skipdecode.graph_passes.conventions import OPSET, int64_constant, required_input, slice_along, static_dim

_RULES = ("gated", "gated_delta")


class WriteOutLinearAttentionPass(ir.passes.InPlacePass):
    """Writes out every LinearAttention with as many query as KV heads, by the rules `gated` and `gated_delta`.

    Args:
        max_tokens: the most tokens that a pass may have; a longer pass would give wrong results.
    """

    def __init__(self, *, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type == "LinearAttention"]
        for node in found:
            _write_out(model.graph, node, self.max_tokens)
        if found:
            model.graph.opset_imports[""] = OPSET
        return ir.passes.PassResult(model, bool(found))


def _write_out(graph: ir.Graph, node: ir.Node, max_tokens: int) -> None:
    heads, rule = node.attributes["kv_num_heads"].as_int(), node.attributes["update_rule"].as_string()
    assert rule in _RULES and node.attributes["q_num_heads"].as_int() == heads, f"{rule} with {node.attributes}"
    tape, past = Tape(), required_input(node, 3)
    query, key, value = (_split_heads(tape, required_input(node, index), heads) for index in range(3))
    gate = _split_heads(tape, required_input(node, 4), heads)
    token_indices = _token_indices(tape, query)
    decays = _decays(tape, gate, token_indices)
    decays_from_start = tape.op("Exp", [_cumulated(tape, gate)])
    if rule == "gated_delta":
        beta = _split_heads(tape, required_input(node, 5), heads)
        recalled = _product(tape, tape.op("Mul", [key, decays_from_start]), past)
        changes = tape.op("Mul", [tape.op("Sub", [value, recalled]), beta])
        overlaps = tape.op("Mul", [tape.op("Mul", [_product(tape, key, _transposed(tape, key)), decays]), beta])
        value = _product(tape, _inverse(tape, overlaps, token_indices, max_tokens), changes)
    scores = tape.op("Mul", [_product(tape, query, _transposed(tape, key)), decays])
    out = tape.op("Add", [_product(tape, tape.op("Mul", [query, decays_from_start]), past), _product(tape, scores, value)])
    out = tape.op("Mul", [out, _float_constant(tape, node.attributes.get_float("scale", 0.0) or static_dim(past, 2) ** -0.5)])
    out = tape.op("Reshape", [tape.op("Transpose", [out], {"perm": [0, 2, 1, 3]}), int64_constant(tape, 0, 0, -1)])
    decayed_keys = tape.op("Mul", [key, _transposed(tape, slice_along(tape, decays, 2, -1))])
    decayed_past = tape.op("Mul", [past, slice_along(tape, decays_from_start, 2, -1)])
    present = tape.op("Add", [decayed_past, _product(tape, _transposed(tape, decayed_keys), value)])
    ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [out, present])


def _decays(tape: Tape, gate: ir.Value, token_indices: tuple[ir.Value, ir.Value]) -> ir.Value:
    """The decays of gates g [B,H,S,1]: e^(g_(i+1) + .. + g_t), 0 for i > t; [B,H,S,S]."""
    later = _zero_outside(tape, tape.op("Greater", [*token_indices]), gate)
    # the first token's row is zeros and left out, so that a single token leaves nothing to sum
    sums = _cumulated(tape, slice_along(tape, later, 2, 1))
    sums = tape.op("Concat", [slice_along(tape, later, 2, 0, 1), sums], {"axis": 2})
    return _zero_outside(tape, tape.op("GreaterOrEqual", [*token_indices]), tape.op("Exp", [sums]))


def _inverse(tape: Tape, overlaps: ir.Value, token_indices: tuple[ir.Value, ir.Value], max_tokens: int) -> ir.Value:
    """The inverse of 1 + A [B,H,S,S], where A is `overlaps` below its diagonal."""
    row, column = token_indices
    below_diagonal = _zero_outside(tape, tape.op("Greater", [row, column]), overlaps)
    identity = _zero_outside(tape, tape.op("Equal", [row, column]), _float_constant(tape, 1.0))
    size, same_block = 2, _in_same_block(tape, token_indices, 2)
    inverse = tape.op("Sub", [identity, _zero_outside(tape, same_block, below_diagonal)])
    while size < max_tokens:
        size, same_half = 2 * size, same_block
        same_block = _in_same_block(tape, token_indices, size)
        across_halves = _zero_outside(tape, tape.op("Xor", [same_block, same_half]), below_diagonal)
        inverse = tape.op("Sub", [inverse, _product(tape, inverse, _product(tape, across_halves, inverse))])
    return inverse


def _token_indices(tape: Tape, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The tokens' indices within the pass, as [S,1] and [1,S], for rows [B,H,S,D]."""
    count = tape.op("Squeeze", [tape.op("Shape", [rows], {"start": 2, "end": 3})])
    indices = tape.op("Range", [_int64_scalar(tape, 0), count, _int64_scalar(tape, 1)])
    return tape.op("Unsqueeze", [indices, int64_constant(tape, 1)]), tape.op("Unsqueeze", [indices, int64_constant(tape, 0)])


def _in_same_block(tape: Tape, token_indices: tuple[ir.Value, ir.Value], size: int) -> ir.Value:
    """Which pairs of tokens are in the same block of `size` tokens, bool [S,S]."""
    return tape.op("Equal", [tape.op("Div", [indices, int64_constant(tape, size)]) for indices in token_indices])


def _split_heads(tape: Tape, rows: ir.Value, heads: int) -> ir.Value:
    """[B,S,H*D] to [B,H,S,D]."""
    return tape.op("Transpose", [tape.op("Reshape", [rows, int64_constant(tape, 0, 0, heads, -1)])], {"perm": [0, 2, 1, 3]})


def _cumulated(tape: Tape, value: ir.Value) -> ir.Value:
    """Sums over the tokens up to each one, of a value [B,H,S,..]."""
    return tape.op("CumSum", [value, tape.op("Constant", [], {"value_int": 2})])


def _product(tape: Tape, left: ir.Value, right: ir.Value) -> ir.Value:
    return tape.op("MatMul", [left, right])


def _transposed(tape: Tape, matrices: ir.Value) -> ir.Value:
    return tape.op("Transpose", [matrices], {"perm": [0, 1, 3, 2]})


def _zero_outside(tape: Tape, mask: ir.Value, numbers: ir.Value) -> ir.Value:
    """The numbers, and 0 where the mask is false."""
    return tape.op("Where", [mask, numbers, _float_constant(tape, 0.0)])


def _float_constant(tape: Tape, number: float) -> ir.Value:
    return tape.op("Constant", [], {"value_float": number})


def _int64_scalar(tape: Tape, number: int) -> ir.Value:
    return tape.op("Constant", [], {"value_int": number})
