"""A graph that a pass does not understand gives an error of one line."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from skipdecode.errors import ModelNotSupportedError
from skipdecode.graph_passes.lower_attention import LowerAttentionPass
from skipdecode.graph_passes.run_passes import run_passes
from tests.graph_passes.running import with_shapes

UNKNOWN = """<ir_version: 10, opset_import: ["" : 24]>
layer_007 (float[B,2,S,8] q, float[B,2,C,8] k, float[B,2,C,8] v) => (float[B,2,S,8] y) { y = Attention (q, k, v) }"""


class _Fails(ir.passes.InPlacePass):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        raise self.error


class _LeavesAttention(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, False)

    def ensures(self, model: ir.Model) -> None:
        raise ir.passes.PostconditionError("operators that were not lowered: ['Attention']")


def test_a_pattern_that_a_pass_does_not_know_is_named_with_its_graph_and_pass() -> None:
    with pytest.raises(ModelNotSupportedError) as raised:
        run_passes(with_shapes(UNKNOWN), [LowerAttentionPass(max_length=16)])
    line = str(raised.value)
    assert line.startswith("layer_007: LowerAttentionPass does not know this graph (")
    assert line.endswith("); report the model's config.json, or choose another --target")
    assert "\n" not in line and "object at" not in line


def test_what_a_pass_should_have_replaced_is_named() -> None:
    with pytest.raises(ModelNotSupportedError, match=r"^layer_007: _LeavesAttention .*\(operators that were not lowered: \['Att"):
        run_passes(with_shapes(UNKNOWN), [_LeavesAttention()])


def test_an_error_that_has_a_cause_is_raised_and_not_its_cause() -> None:
    class Refuses(ir.passes.InPlacePass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            raise ModelNotSupportedError("refused") from ValueError("a damaged tensor")

    with pytest.raises(ModelNotSupportedError, match=r"^refused$"):
        run_passes(with_shapes(UNKNOWN), [Refuses()])


def test_of_passes_that_run_others_the_inner_pass_is_named() -> None:
    class Cleans(ir.passes.InPlacePass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            run_passes(model, [_LeavesAttention()])
            return ir.passes.PassResult(model, False)

    with pytest.raises(ModelNotSupportedError, match=r"^layer_007: _LeavesAttention does not know"):
        run_passes(with_shapes(UNKNOWN), [Cleans()])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError(), ModelNotSupportedError("refused")])
def test_errors_with_a_meaning_of_their_own_are_raised_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        run_passes(with_shapes(UNKNOWN), [_Fails(error)])
    assert raised.value is error
