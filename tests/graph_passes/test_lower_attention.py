"""`TensorScatter` and `Attention` become GroupQueryAttention."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.conventions import required_input
from skipdecode.graph_passes.lower_attention import LowerAttentionPass
from tests.graph_passes.running import replaced, run_model, with_shapes

BEFORE = """<ir_version: 10, opset_import: ["" : 24]>
layer (float[B,S,32] rows_q, float[B,S,16] rows_k, float[B,S,16] rows_v, int64[B,S] position_ids,
       float[B,1,C,16] past_key, float[B,1,C,16] past_value, int64[B] start, bool[B,1,S,C] visible)
    => (float[B,S,32] rows_out, float[B,1,C,16] present_key, float[B,1,C,16] present_value)
<int64[4] heads = {0, 0, 2, 16}, int64[4] kv_heads = {0, 0, 1, 16}, int64[3] flat = {0, 0, 32}>
{
    split_q = Reshape (rows_q, heads)
    query = Transpose <perm = [0, 2, 1, 3]> (split_q)
    split_k = Reshape (rows_k, kv_heads)
    key = Transpose <perm = [0, 2, 1, 3]> (split_k)
    split_v = Reshape (rows_v, kv_heads)
    value = Transpose <perm = [0, 2, 1, 3]> (split_v)
    present_key = TensorScatter <axis = 2> (past_key, key, start)
    present_value = TensorScatter <axis = 2> (past_value, value, start)
    attended = Attention <scale = 0.25> (query, present_key, present_value, visible)
    turned = Transpose <perm = [0, 2, 1, 3]> (attended)
    rows_out = Reshape (turned, flat)
}
"""

WINDOW = 3
_MASK = """query_slot = Unsqueeze (position_ids, two)  seen = LessOrEqual (slot, query_slot)
    oldest = Sub (query_slot, window)  recent = Greater (slot, oldest)  both = And (seen, recent)  visible = Unsqueeze (both, one)
    attended ="""
WINDOWED = replaced(
    BEFORE,
    ("bool[B,1,S,C] visible", "int64[1,1,C] slot"),
    ("attended =", _MASK),
    ("<int64[4] heads", f"<int64[1] one = {{1}}, int64[1] two = {{2}}, int64 window = {{{WINDOW}}}, int64[4] heads"),
)

NARROW = replaced(  # values of size 12 where keys have 16, padded with zeros in the buffer
    BEFORE,
    ("float[B,S,16] rows_v", "float[B,S,12] rows_v"),
    ("(rows_v, kv_heads)", "(rows_v, v_heads)"),
    ("    value = Transpose", "    thin = Transpose"),
    ("    present_key =", "    value = Pad (thin, widen)\n    present_key ="),
    ("    rows_out = Reshape (turned", "    part = Slice (turned, zero, twelve, three)\n    rows_out = Reshape (part"),
    ("float[B,S,32] rows_out", "float[B,S,24] rows_out"),
    (
        "{0, 0, 32}",
        "{0, 0, 24}, int64[4] v_heads = {0, 0, 1, 12}, int64[8] widen = {0, 0, 0, 0, 0, 0, 0, 4},"
        " int64[1] zero = {0}, int64[1] twelve = {12}, int64[1] three = {3}",
    ),
)
_ROTATED = """positions = Cast <to = 1> (position_ids)  at = Unsqueeze (positions, two)  angles = Mul (at, frequencies)
    cosine = Cos (angles)  cos = Mul (cosine, factor)  sine = Sin (angles)  sin = Mul (sine, factor)
    query = RotaryEmbedding <interleaved = 0, num_heads = 2> (query_0, cos, sin) 
    key = RotaryEmbedding <interleaved = 0, num_heads = 1> (key_0, cos, sin)
    split_v ="""
_FREQUENCIES = ", ".join(str(0.5**index) for index in range(8))
ROTATED = replaced(  # by YaRN, whose tables are scaled by a factor
    BEFORE,
    ("query = Transpose", "query_0 = Transpose"),
    ("key = Transpose", "key_0 = Transpose"),
    ("split_v =", _ROTATED),
    (
        "int64[4] heads",
        f"int64[1] two = {{2}}, float factor = {{1.25}}, float[8] frequencies = {{{_FREQUENCIES}}}, int64[4] heads",
    ),
)
_SINKS = """alone, , , scores = Attention <scale = 0.25, qk_matmul_output_mode = 2> (query, present_key, present_value, visible)
    sum = ReduceLogSumExp (scores, last)  sinks_3 = Reshape (sinks, a_head)  difference = Sub (sum, sinks_3)
    left = Sigmoid (difference)  attended = Mul (alone, left)"""


_ALIBI = """buffer = Shape <start = 2, end = 3> (past_key)  slots = Squeeze (buffer)  numbers = Range (first, slots, next)
    query_slot = Unsqueeze (position_ids, around)  ways = Sub (numbers, query_slot)  factors = Cast <to = 1> (ways)
    biases = Mul (slopes, factors)  mask = Where (visible, biases, never)
    attended = Attention <scale = 0.25> (query, present_key, present_value, mask)"""
ALIBI = replaced(
    BEFORE,
    ("attended = Attention <scale = 0.25> (query, present_key, present_value, visible)", _ALIBI),
    (
        "int64[4] heads",
        "int64 first = {0}, int64 next = {1}, int64[2] around = {1, 3}, float[2,1,1] slopes = {0.5, 0.25},"
        " float never = {-inf}, int64[4] heads",
    ),
)


_SECOND = """split_2 = Reshape (rows_2, heads)  query_2 = Transpose <perm = [0, 2, 1, 3]> (split_2)
    attended_2 = Attention <scale = 0.25> (query_2, present_key, present_value, visible)
    turned_2 = Transpose <perm = [0, 2, 1, 3]> (attended_2)  rows_out_2 = Reshape (turned_2, flat)
}"""
READ_BELOW = replaced(  # a second layer reads what the first has written
    BEFORE,
    ("}\n", _SECOND),
    ("float[B,S,32] rows_q,", "float[B,S,32] rows_q, float[B,S,32] rows_2,"),
    ("float[B,S,32] rows_out,", "float[B,S,32] rows_out, float[B,S,32] rows_out_2,"),
)
READ = f"""<ir_version: 10, opset_import: ["" : 24]>
layer (float[B,S,32] rows_2, int64[B,S] position_ids, float[B,1,C,16] present_key, float[B,1,C,16] present_value,
       bool[B,1,S,C] visible) => (float[B,S,32] rows_out_2) <int64[4] heads = {{0, 0, 2, 16}}, int64[3] flat = {{0, 0, 32}}>
{{   {_SECOND}"""


def _with_sinks(text: str) -> str:
    """The same graph, whose attention has sinks [NH]."""
    return replaced(
        text,
        ("attended = Attention <scale = 0.25> (query, present_key, present_value, visible)", _SINKS),
        ("int64[B,S] position_ids,", "int64[B,S] position_ids, float[2] sinks,"),
        ("int64[4] heads", "int64[1] last = {-1}, int64[3] a_head = {-1, 1, 1}, int64[4] heads"),
    )


def test_attention_and_scatter_become_one_operator_that_reads_rows_directly() -> None:
    model = with_shapes(BEFORE)
    assert LowerAttentionPass(max_length=8)(model).modified
    (node,) = model.graph
    assert (node.domain, node.op_type) == ("com.microsoft", "GroupQueryAttention")
    assert [value.name for value in node.inputs] == [
        "rows_q", "rows_k", "rows_v", "past_key", "past_value", "seqlens_k", "total_sequence_length",
    ]  # fmt: skip
    assert [value.name for value in node.outputs] == ["rows_out", "present_key", "present_value"]
    assert node.attributes["num_heads"].as_int() == 2
    assert node.attributes["kv_num_heads"].as_int() == 1


def test_a_second_run_changes_nothing() -> None:
    model = with_shapes(BEFORE)
    LowerAttentionPass(max_length=8)(model)
    text = ir.to_onnx_text(model)
    assert not LowerAttentionPass(max_length=8)(model).modified
    assert ir.to_onnx_text(model) == text


def test_attention_without_a_kv_buffer_is_an_error() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 24]>
        g (float[1,2,3,16] q, float[1,2,3,16] k, float[1,2,3,16] v) => (float[1,2,3,16] y) { y = Attention (q, k, v) }"""
    )
    with pytest.raises(AssertionError, match="k is not made by TensorScatter, nor of another layer"):
        LowerAttentionPass(max_length=8)(model)


def test_keys_and_values_of_another_layer_are_read_in_place() -> None:
    model = with_shapes(READ_BELOW)
    LowerAttentionPass(max_length=8)(model)
    writer, reader = (node for node in model.graph if node.op_type == "GroupQueryAttention")
    assert [*reader.inputs[3:5]] == [*writer.outputs[1:]] and len(reader.outputs) == 1
    model = with_shapes(READ)
    LowerAttentionPass(max_length=8)(model)
    (reader,) = (node for node in model.graph if node.op_type == "GroupQueryAttention")
    assert [value and value.name for value in reader.inputs[3:5]] == ["present_key", "present_value"]
    assert [value.name for value in model.graph.outputs] == ["rows_out_2"]


def test_the_operator_gets_a_window_only_where_a_run_can_outgrow_it() -> None:
    for max_length, expected in ((WINDOW, None), (WINDOW + 1, WINDOW)):
        model = with_shapes(WINDOWED)
        LowerAttentionPass(max_length=max_length)(model)
        (node,) = model.graph
        attribute = node.attributes.get("local_window_size")
        assert (attribute and attribute.as_int()) == expected


def test_sinks_become_an_input_of_the_operator() -> None:
    model = with_shapes(_with_sinks(BEFORE))
    LowerAttentionPass(max_length=8)(model)
    (node,) = model.graph
    assert [value and value.name for value in node.inputs[7:]] == [None, None, None, None, "sinks"]
    assert [value.name for value in node.outputs] == ["rows_out", "present_key", "present_value"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("qk_matmul_output_mode = 2", "qk_matmul_output_mode = 0", "scores that are not those of the softmax"),
        ("Mul (alone, left)", "Mul (query, left)", "a share of something else"),
    ],
)
def test_a_sink_next_to_unmasked_scores_or_of_another_value_is_an_error(old: str, new: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        LowerAttentionPass(max_length=8)(with_shapes(replaced(_with_sinks(BEFORE), (old, new))))


def test_a_scatter_that_no_attention_reads_is_an_error() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 24]>
        g (float[1,2,9,16] past, float[1,2,3,16] k, int64[1] start) => (float[1,2,9,16] y)
        { y = TensorScatter <axis = 2> (past, k, start) }"""
    )
    with pytest.raises(ir.passes.PostconditionError, match=r"operators that were not lowered: \['TensorScatter'\]"):
        LowerAttentionPass(max_length=8)(model)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{-inf}", "{-9.0}", "slots that are not seen have scores"),
        ("numbers = Range (first, slots, next)", "numbers = Identity (lengths)", "numbers is not made by Range"),
    ],
)
def test_biases_of_another_kind_are_an_error(old: str, new: str, message: str) -> None:
    text = replaced(ALIBI, (old, new), ("int64[B] start", "int64[C] lengths, int64[B] start"))
    with pytest.raises(AssertionError, match=message):
        LowerAttentionPass(max_length=8)(with_shapes(text))


@pytest.mark.parametrize(
    ("positions", "last"),
    [([[0, 1, 2, 3, 4]] * 2, [4, 4]), ([[6], [3]], [6, 3]), ([[4, 5, 6]], [6])],
    ids=["prompts", "step", "chunk"],
)
def test_with_biases_the_operator_gets_each_rows_last_position_padded_or_not(positions: list[list[int]], last: list[int]) -> None:
    """CUDA's kernel with biases puts the last of S queries at the last valid slot, so a padded row's would see too little."""
    model = with_shapes(ALIBI)
    LowerAttentionPass(max_length=9)(model)
    (node,) = (node for node in model.graph if node.op_type == "GroupQueryAttention")
    assert "seqlens_k" not in [value.name for value in model.graph.inputs]
    model.graph.outputs.append(required_input(node, 5))
    rows, new = np.shape(positions)
    feeds = {
        "rows_q": np.zeros((rows, new, 32), np.float32),
        **{name: np.zeros((rows, new, 16), np.float32) for name in ("rows_k", "rows_v")},
        **{name: np.zeros((rows, 1, 9, 16), np.float32) for name in ("past_key", "past_value")},
        "position_ids": np.array(positions),
        "start": np.array(positions)[:, 0],
        "visible": np.ones((rows, 1, new, 9), bool),
        "total_sequence_length": np.array([max(last) + 1], np.int32),
    }
    assert run_model(model, feeds)[-1].tolist() == last


def test_a_rotary_embedding_moves_inside_with_its_tables_factor() -> None:
    model = with_shapes(ROTATED)
    LowerAttentionPass(max_length=8)(model)
    (node,) = model.graph
    tables = [value.const_value.numpy() for value in node.inputs[7:9] if value is not None and value.const_value is not None]
    assert [table.shape for table in tables] == [(8, 8)] * 2
    np.testing.assert_allclose(tables[0] ** 2 + tables[1] ** 2, 1.25**2, rtol=1e-6)


_OTHER = "int64[1] two = {2}, float[8] others = {1, 1, 1, 1, 1, 1, 1, 1},"
UNLIKE = {  # one table for query and key would rotate otherwise
    "keys by other frequencies": replaced(
        ROTATED,
        ("(key_0, cos, sin)", "(key_0, cos_k, sin_k)"),
        (
            "cosine = Cos",
            "angles_k = Mul (at, others)  cosine_k = Cos (angles_k)  cos_k = Mul (cosine_k, factor)\n    cosine = Cos",
        ),
        ("sine = Sin", "sine_k = Sin (angles_k)  sin_k = Mul (sine_k, factor)  sine = Sin"),
        ("int64[1] two = {2},", _OTHER),
    ),
    "other pairs of a key's numbers": replaced(ROTATED, ("<interleaved = 0, num_heads = 1>", "<interleaved = 1, num_heads = 1>")),
    "backward": replaced(ROTATED, ("sin = Mul (sine, factor)", "ahead = Mul (sine, factor)  sin = Neg (ahead)")),
    "sines by another factor": replaced(
        ROTATED, ("Mul (sine, factor)", "Mul (sine, more)"), ("int64[1] two", "float more = {1.5}, int64[1] two")
    ),
    "sines of other angles": replaced(
        ROTATED, ("sine = Sin (angles)", "apart = Mul (at, others)  sine = Sin (apart)"), ("int64[1] two = {2},", _OTHER)
    ),
    "sines for cosines": ROTATED.replace("_0, cos, sin)", "_0, sin, cos)"),
}
UNEVEN_HEADS = ROTATED.replace("16", "24").replace("32", "48").replace("<inter", "<rotary_embedding_dim = 16, inter")
NEIGHBOURS = ROTATED.replace("<interleaved = 0,", "<interleaved = 1,")


@pytest.mark.parametrize("text", [*UNLIKE.values(), UNEVEN_HEADS], ids=[*UNLIKE, "heads of 24"])
def test_a_rotary_embedding_stays_outside_where_the_operator_would_rotate_otherwise(text: str) -> None:
    model = with_shapes(text)
    LowerAttentionPass(max_length=8)(model)
    assert [node.op_type for node in model.graph].count("RotaryEmbedding") == 2
    (node,) = (node for node in model.graph if node.op_type == "GroupQueryAttention")
    assert node.attributes["do_rotary"].as_int() == 0


def test_tables_of_other_frequencies_or_another_factor_have_other_names() -> None:
    """Layers of one graph share tables by their names."""
    names = set()
    for text in (ROTATED, replaced(ROTATED, ("{1.25}", "{1.5}")), replaced(ROTATED, ("0.0078125", "0.0078"))):
        model = with_shapes(text)
        LowerAttentionPass(max_length=8)(model)
        names |= {name for name in model.graph.initializers if name.startswith("cos_cache")}
    assert len(names) == 3


def test_separate_query_and_key_tables_from_the_same_angles_count_as_one() -> None:
    """Narrow graphs have such tables."""
    apart = """cosine_k = Cos (angles)  cos_m = Mul (cosine_k, factor)  cos_k = Cast <to = 1> (cos_m)
    sine_k = Sin (angles)  sin_m = Mul (sine_k, factor)  sin_k = Cast <to = 1> (sin_m)  key = RotaryEmbedding"""
    model = with_shapes(replaced(ROTATED, ("key = RotaryEmbedding", apart), ("(key_0, cos, sin)", "(key_0, cos_k, sin_k)")))
    LowerAttentionPass(max_length=8)(model)
    (node,) = model.graph
    assert node.attributes["do_rotary"].as_int() == 1


FORMS = {
    "all": BEFORE, "windowed": WINDOWED, "narrow values": NARROW, "rotated": ROTATED, "rotated in neighbouring pairs": NEIGHBOURS,
    **UNLIKE, "sinks": _with_sinks(BEFORE),
    "capped": replaced(BEFORE, ("scale = 0.25", "scale = 0.25, softcap = 0.5")),
    "windowed, sinks": _with_sinks(WINDOWED), "rotated, sinks": _with_sinks(ROTATED), "biases": ALIBI,
    "read of the layer below": READ_BELOW, "read of another engine": READ,
}  # fmt: skip


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("past", "new", "rows"), [(0, 5, 1), (4, 1, 3), (4, 3, 1)])
def test_outputs_are_numerically_equal_at_prefill_decode_and_in_chunks(past: int, new: int, rows: int, text: str) -> None:
    from skipdecode.engines.ort import use_threads

    use_threads(None)
    rng, slots = np.random.default_rng(0), 9
    buffers = np.zeros((2, rows, 1, slots, 16), np.float32)
    buffers[:, :, :, :past] = rng.standard_normal((2, rows, 1, past, 16))
    positions = np.arange(past, past + new)[None].repeat(rows, 0)
    feeds = {
        "rows_q": rng.standard_normal((rows, new, 32)).astype(np.float32),
        "rows_2": rng.standard_normal((rows, new, 32)).astype(np.float32),
        "present_key": rng.standard_normal((rows, 1, slots, 16)).astype(np.float32),
        "present_value": rng.standard_normal((rows, 1, slots, 16)).astype(np.float32),
        "rows_k": rng.standard_normal((rows, new, 16)).astype(np.float32),
        "rows_v": rng.standard_normal((rows, new, 12 if text is NARROW else 16)).astype(np.float32),
        "past_key": buffers[0],
        "past_value": buffers[1],
        "position_ids": positions,
        "start": positions[:, 0],
        "visible": (np.arange(slots) <= positions[:, :, None])[:, None],
        "sinks": np.array([0.5, -1.5], np.float32),
        "slot": np.arange(slots)[None, None],
        "seqlens_k": np.full(rows, past + new - 1, np.int32),
        "total_sequence_length": np.array([past + new], np.int32),
    }
    before, after = with_shapes(text), with_shapes(text)
    LowerAttentionPass(max_length=slots)(after)
    for expected, found in zip(run_model(before, feeds), run_model(after, feeds), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
