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

from skipdecode.graph_passes.conventions import OPSET, TO_THE_END, constant, required, static_dim

_RULES = ("gated", "gated_delta")


class WriteOutLinearAttentionPass(ir.passes.InPlacePass):
    """Applies to every LinearAttention with as many query as KV heads, by the rules `gated` and `gated_delta`.

    Args:
        most_tokens: the most tokens that a pass may have; a longer pass would give wrong results.
    """

    def __init__(self, *, most_tokens: int) -> None:
        super().__init__()
        self.most_tokens = most_tokens

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type == "LinearAttention"]
        for node in found:
            _write_out(model.graph, node, self.most_tokens)
        if found:
            model.graph.opset_imports[""] = OPSET
        return ir.passes.PassResult(model, bool(found))


def _write_out(graph: ir.Graph, node: ir.Node, most_tokens: int) -> None:
    heads, rule = node.attributes["kv_num_heads"].as_int(), node.attributes["update_rule"].as_string()
    assert rule in _RULES and node.attributes["q_num_heads"].as_int() == heads, f"{rule} with {node.attributes}"
    tape, past = Tape(), required(node, 3)
    query, key, value = (_by_head(tape, required(node, index), heads) for index in range(3))
    gate = _by_head(tape, required(node, 4), heads)
    places = _places(tape, query)
    decays = _decays(tape, gate, places)
    since = tape.op("Exp", [tape.op("CumSum", [gate, constant(tape, 2)])])
    if rule == "gated_delta":
        beta = _by_head(tape, required(node, 5), heads)
        known = _product(tape, tape.op("Mul", [key, since]), past)
        missing = tape.op("Mul", [tape.op("Sub", [value, known]), beta])
        overlaps = tape.op("Mul", [tape.op("Mul", [_product(tape, key, _transposed(tape, key)), decays]), beta])
        value = _product(tape, _inverse(tape, overlaps, places, most_tokens), missing)
    scores = tape.op("Mul", [_product(tape, query, _transposed(tape, key)), decays])
    out = tape.op("Add", [_product(tape, tape.op("Mul", [query, since]), past), _product(tape, scores, value)])
    out = tape.op("Mul", [out, _number(tape, node.attributes.get_float("scale", 0.0) or static_dim(past, 2) ** -0.5)])
    out = tape.op("Reshape", [tape.op("Transpose", [out], {"perm": [0, 2, 1, 3]}), constant(tape, 0, 0, -1)])
    left = tape.op("Mul", [key, _transposed(tape, _part(tape, decays, -1, TO_THE_END))])
    kept = tape.op("Mul", [past, _part(tape, since, -1, TO_THE_END)])
    present = tape.op("Add", [kept, _product(tape, _transposed(tape, left), value)])
    ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [out, present])


def _decays(tape: Tape, gate: ir.Value, places: tuple[ir.Value, ir.Value]) -> ir.Value:
    """The decays of gates g [B,H,S,1]: e^(g_(i+1) + .. + g_t), 0 for i > t; [B,H,S,S]."""
    later = _where(tape, tape.op("Greater", [*places]), gate)
    # the first token's row is zeros and left out, so that a single token leaves nothing to sum
    sums = tape.op("CumSum", [_part(tape, later, 1, TO_THE_END), constant(tape, 2)])
    sums = tape.op("Concat", [_part(tape, later, 0, 1), sums], {"axis": 2})
    return _where(tape, tape.op("GreaterOrEqual", [*places]), tape.op("Exp", [sums]))


def _inverse(tape: Tape, overlaps: ir.Value, places: tuple[ir.Value, ir.Value], most_tokens: int) -> ir.Value:
    """The inverse of 1 + A [B,H,S,S], where A is `overlaps` below its diagonal."""
    row, column = places
    strict = _where(tape, tape.op("Greater", [row, column]), overlaps)
    one = _where(tape, tape.op("Equal", [row, column]), _number(tape, 1.0))
    size, together = 2, _together(tape, places, 2)
    inverse = tape.op("Sub", [one, _where(tape, together, strict)])
    while size < most_tokens:
        size, before = 2 * size, together
        together = _together(tape, places, size)
        between = _where(tape, tape.op("Xor", [together, before]), strict)
        inverse = tape.op("Sub", [inverse, _product(tape, inverse, _product(tape, between, inverse))])
    return inverse


def _places(tape: Tape, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The tokens' indices within the pass, as [S,1] and [1,S], for rows [B,H,S,D]."""
    count = tape.op("Squeeze", [tape.op("Shape", [rows], {"start": 2, "end": 3})])
    places = tape.op("Range", [_scalar(tape, 0), count, _scalar(tape, 1)])
    return tape.op("Unsqueeze", [places, constant(tape, 1)]), tape.op("Unsqueeze", [places, constant(tape, 0)])


def _together(tape: Tape, places: tuple[ir.Value, ir.Value], size: int) -> ir.Value:
    """Which pairs of tokens are in the same block of `size` tokens, bool [S,S]."""
    return tape.op("Equal", [tape.op("Div", [place, constant(tape, size)]) for place in places])


def _by_head(tape: Tape, rows: ir.Value, heads: int) -> ir.Value:
    """[B,S,H*D] to [B,H,S,D]."""
    return tape.op("Transpose", [tape.op("Reshape", [rows, constant(tape, 0, 0, heads, -1)])], {"perm": [0, 2, 1, 3]})


def _part(tape: Tape, rows: ir.Value, start: int, end: int) -> ir.Value:
    """The tokens from `start` to `end` of rows [B,H,S,D]."""
    return tape.op("Slice", [rows, *(constant(tape, bound) for bound in (start, end, 2))])


def _product(tape: Tape, left: ir.Value, right: ir.Value) -> ir.Value:
    return tape.op("MatMul", [left, right])


def _transposed(tape: Tape, matrices: ir.Value) -> ir.Value:
    return tape.op("Transpose", [matrices], {"perm": [0, 1, 3, 2]})


def _where(tape: Tape, mask: ir.Value, numbers: ir.Value) -> ir.Value:
    """The numbers, and 0 where the mask is false."""
    return tape.op("Where", [mask, numbers, _number(tape, 0.0)])


def _number(tape: Tape, number: float) -> ir.Value:
    return tape.op("Constant", [], {"value_float": number})


def _scalar(tape: Tape, number: int) -> ir.Value:
    return tape.op("Constant", [], {"value_int": number})
