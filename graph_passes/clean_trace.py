"""From the tracer's raw graph to standard ONNX: shape arithmetic folded, norms and rotary as one operator each.

Every weight keeps its parameter name and its stored form: nothing that reads a parameter is folded, nothing of equal value is
merged (two norms of ones are two parameters).
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript import rewriter
from onnxscript.optimizer._constant_folding import FoldConstantsPass
from onnxscript.rewriter.rules.common import _collapse_slices, _no_op
from onnxscript.rewriter.rules.fusion import _layer_norm, _rotary_embedding

from skipdecode.graph_passes.all_groups import AllGroupsPass
from skipdecode.graph_passes.backward_rotary import BackwardRotaryPass
from skipdecode.graph_passes.complex_rotary import ComplexRotaryPass
from skipdecode.graph_passes.concat_parts import ConcatPartsPass
from skipdecode.graph_passes.constant_reshape import ConstantReshapePass
from skipdecode.graph_passes.conventions import is_parameter
from skipdecode.graph_passes.each_head_norm import EachHeadNormPass
from skipdecode.graph_passes.empty_products import EmptyProductsPass
from skipdecode.graph_passes.halves_rotary import HalvesRotaryPass
from skipdecode.graph_passes.interleaved_rotary import InterleavedRotaryPass
from skipdecode.graph_passes.inverse_root import InverseRootPass
from skipdecode.graph_passes.rms_norm import RMSNormPass
from skipdecode.graph_passes.tokens_first_rotary import TokensFirstRotaryPass
from skipdecode.graph_passes.unflatten import UnflattenPass
from skipdecode.graph_passes.unit_norm import UnitNormPass
from skipdecode.graph_passes.weight_first import WeightFirstPass
from skipdecode.graph_passes.wide_states import WideStatesPass

# without x + 0, which takes a norm's epsilon of 1e-8 for 0
_TIDY = [*_no_op.mul_by_1_rule.commute(), _no_op.div_by_1_rule, _no_op.dropout_inference_rule, *_collapse_slices.rules.rules]


def clean_trace(model: ir.Model) -> ir.passes.PassResult:
    """Apply what every traced graph goes through, in place; parameters are the initializers whose names hold a dot."""
    return ir.passes.Sequential(
        common.InlinePass(),
        ir.passes.PassManager(
            [
                FoldConstantsPass(shape_inference=True, input_size_limit=1024, output_size_limit=1024, should_fold=_fold),
                rewriter.RewritePass(_TIDY),
                common.RemoveUnusedNodesPass(),
            ],
            steps=2,
        ),
        common.CommonSubexpressionEliminationPass(),
        InverseRootPass(),
        rewriter.RewritePass(_layer_norm.LayerNormFusion.rule().commute()),
        RMSNormPass(),
        UnitNormPass(),
        EachHeadNormPass(),
        rewriter.RewritePass([_rotary_embedding.RotaryEmbedding23Fusion.rule()]),
        ConcatPartsPass(),
        TokensFirstRotaryPass(),
        HalvesRotaryPass(),
        BackwardRotaryPass(),
        ComplexRotaryPass(),
        InterleavedRotaryPass(),  # and parts of heads, whichever rule found them
        AllGroupsPass(),
        common.RemoveUnusedNodesPass(),
        UnflattenPass(),
        ConstantReshapePass(),
        EmptyProductsPass(),
        WeightFirstPass(),
        WideStatesPass(),
        common.CommonSubexpressionEliminationPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
        common.ClearMetadataAndDocStringPass(),
    )(model)


def _fold(node: ir.Node) -> bool | None:
    """False where a parameter is read, else the folder's own rule."""
    return False if any(value is not None and value.is_initializer() and is_parameter(value) for value in node.inputs) else None
