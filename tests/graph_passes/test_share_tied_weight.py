"""An engine's own weight becomes an input, with the same results."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.share_tied_weight import ShareTiedWeightPass
from tests.graph_passes.running import run_model

WEIGHT = np.arange(15, dtype=np.float32).reshape(5, 3) - 7  # [V,E]


def _table(weight: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> str:
    return f"<float[{len(weight)},3] table = {{{', '.join(map(str, weight.flat))}}}>"


TABLE = _table(WEIGHT)
EMBED = f"""<ir_version: 10, opset_import: ["" : 24]>
g (int64[B,S] input_ids) => (float[B,S,3] hidden) {TABLE} {{ hidden = Gather (table, input_ids) }}"""
HEAD = f"""<ir_version: 10, opset_import: ["" : 24]>
g (float[B,1,3] hidden) => (float[B,1,5] logits) {TABLE}
{{
    turned = Transpose <perm = [1, 0]> (table)
    logits = MatMul (hidden, turned)
}}"""
INPUTS = {
    EMBED: {"input_ids": np.array([[4, 0], [2, 2]])},
    HEAD: {"hidden": np.array([[[1, 2, 3]], [[-1, 0, 5]]], dtype=np.float32)},
}


@pytest.mark.parametrize("vocabulary", [5, 8])
@pytest.mark.parametrize(
    ("text", "operators"), [(EMBED, ["Gather"]), (HEAD, ["Squeeze", "Gemm", "Slice", "Unsqueeze"])], ids=["embedding", "head"]
)
def test_the_weight_becomes_an_input_padded_to_whole_blocks_with_the_same_results(
    text: str, operators: list[str], vocabulary: int
) -> None:
    weight = np.concatenate([WEIGHT, WEIGHT[: vocabulary - 5]])
    before = ir.from_onnx_text(text.replace(TABLE, _table(weight)).replace("1,5]", f"1,{vocabulary}]"))
    after = before.clone()
    assert ShareTiedWeightPass("table")(after).modified
    expected_operators = [each for each in operators if vocabulary == 5 or each != "Slice"]
    assert [node.op_type for node in after.graph] == expected_operators
    given = after.graph.inputs[1]
    assert given.name == "tied_weight" and given.shape == (8, 3) and "table" not in after.graph.initializers
    padded = np.concatenate([weight, np.zeros((8 - vocabulary, 3), np.float32)])
    (expected,), (found,) = run_model(before, INPUTS[text]), run_model(after, {**INPUTS[text], "tied_weight": padded})
    np.testing.assert_array_equal(found, expected)
    assert np.abs(found).max() > 0


def test_it_leaves_a_graph_without_that_weight_alone() -> None:
    assert not ShareTiedWeightPass("lm_head.weight")(ir.from_onnx_text(HEAD)).modified
