"""One attention operator is written out as those that it is made of, with the same results."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from skipdecode.graph_passes.write_out_attention import WriteOutAttentionPass
from tests.graph_passes.running import replaced, run_model, with_shapes

CAPPED = """<ir_version: 10, opset_import: ["" : 24]>
attend (float[B,4,S,16] query, float[B,2,6,16] key, float[B,2,6,16] value, bool[B,1,S,6] mask)
    => (float[B,4,S,16] attended)
{
    attended = Attention <scale = 0.25, softcap = 2.0> (query, key, value, mask)
}"""
# as attention sinks are traced
WITH_SCORES = CAPPED.replace("<scale = 0.25, softcap = 2.0>", "<scale = 0.25, qk_matmul_output_mode = 2>").replace(
    "attended = Attention", "out, present_key, present_value, scores = Attention"
).replace(
    "(query, key, value, mask)\n}",
    """(query, key, value, mask)
    sums = ReduceLogSumExp <keepdims = 1> (scores, last)  difference = Sub (sums, sinks)  share = Sigmoid (difference)
    attended = Mul (out, share)\n}""",
).replace(
    "(float[B,4,S,16] attended)", "(float[B,4,S,16] attended)\n    <int64[1] last = {-1}, float[4,1,1] sinks = {3, 1, 2, 0.5}>"
)  # fmt: skip
FEW_HEADS = CAPPED.replace(", softcap = 2.0", "").replace("[B,4,S,16]", "[B,2,S,16]")
SMALL_HEADS = CAPPED.replace(", softcap = 2.0", "").replace("16]", "8]")
TWICE = """<ir_version: 10, opset_import: ["" : 24]>
attend (float[B,4,S,16] query, float[B,2,6,16] key, float[B,2,6,16] value, bool[B,1,S,6] mask)
    => (float[B,4,S,16] again)
{
    attended = Attention <scale = 0.25> (query, key, value, mask)
    again = Attention <scale = 0.5> (attended, key, value, mask)
}"""
BIASED = SMALL_HEADS.replace("bool[B,1,S,6] mask", "float[B,4,S,6] mask")


def _feeds(model: ir.Model) -> dict[str, np.ndarray]:
    """Two rows of three tokens at slots 3 to 5."""
    rng = np.random.default_rng(0)
    queries, size = (model.graph.inputs[0].shape[axis] for axis in (1, 3))
    feeds = {name: rng.standard_normal((2, heads, tokens, size), dtype=np.float32) for name, heads, tokens in
             (("query", queries, 3), ("key", 2, 6), ("value", 2, 6))}  # fmt: skip
    visible = np.tril(np.ones((3, 6), dtype=bool), 3)[None, None].repeat(2, 0)
    if model.graph.inputs[3].dtype == ir.DataType.BOOL:
        return feeds | {"mask": visible}
    return feeds | {"mask": np.where(visible, rng.standard_normal((2, 4, 3, 6), dtype=np.float32), -np.inf).astype(np.float32)}


@pytest.mark.parametrize(
    "text",
    [CAPPED, WITH_SCORES, FEW_HEADS, SMALL_HEADS, BIASED],
    ids=["capped", "with scores", "few heads", "small heads", "with biases"],
)
def test_it_is_written_out_with_the_same_result(text: str) -> None:
    before, after = with_shapes(text), with_shapes(text)
    assert WriteOutAttentionPass(slots=6)(after).modified
    kinds = [node.op_type for node in after.graph]
    assert "Attention" not in kinds and kinds.count("MatMul") == 2
    feeds = _feeds(before)
    np.testing.assert_allclose(run_model(after, feeds)[0], run_model(before, feeds)[0], rtol=1e-5, atol=1e-6)
    assert not WriteOutAttentionPass(slots=6)(after).modified


def test_what_sinks_leave_of_the_softmax_is_computed_in_single_precision() -> None:
    """fp16 would round the logarithms, here 16 to 32 as the scores, to 64ths, bf16 to eighths. ONNX Runtime never does so."""
    larger = replaced(WITH_SCORES, ("{3, 1, 2, 0.5}", "{20, 21, 19, 22}"))
    cast = ("float[4,1,1] sinks", "float[4,1,1] wide"), ("    out,", "    sinks = Cast <to = 10> (wide)  out,")
    wide, narrow = with_shapes(larger), with_shapes(replaced(larger, *cast).replace("float[B", "float16[B"))
    assert WriteOutAttentionPass(slots=6)(narrow).modified
    feeds = _feeds(wide)
    eighths = np.rint(4 * feeds["key"] + 10) / 8  # scores, their sums, are exact in fp16
    feeds |= {"query": np.full_like(feeds["query"], 4), "key": eighths, "value": np.ones_like(feeds["value"])}
    narrowed = {name: array if array.dtype == bool else array.astype(np.float16) for name, array in feeds.items()}
    found = ReferenceEvaluator(ir.to_proto(narrow)).run(None, narrowed)[0]
    np.testing.assert_allclose(found, run_model(wide, feeds)[0], rtol=1e-3)


def test_the_second_of_two_operators_that_read_the_same_keys_is_written_out() -> None:
    before, after = with_shapes(TWICE), with_shapes(TWICE)
    assert WriteOutAttentionPass(slots=6)(after).modified
    (kept,) = (node for node in after.graph if node.op_type == "Attention")
    assert kept.attributes["scale"].as_float() == 0.25
    feeds = _feeds(before)
    np.testing.assert_allclose(run_model(after, feeds)[0], run_model(before, feeds)[0], rtol=1e-5, atol=1e-6)
    assert not WriteOutAttentionPass(slots=6)(after).modified


def test_attention_with_unknown_settings_is_an_error() -> None:
    with pytest.raises(ir.passes.PassError) as caught:
        ir.passes.Sequential(WriteOutAttentionPass(slots=6))(
            with_shapes(CAPPED.replace("softcap = 2.0", "softcap = 2.0, is_causal = 1"))
        )
    assert "is_causal" in str(caught.value.__cause__)


def test_attention_that_has_a_kernel_is_left_alone() -> None:
    assert not WriteOutAttentionPass(slots=6)(with_shapes(CAPPED.replace(", softcap = 2.0", ""))).modified
