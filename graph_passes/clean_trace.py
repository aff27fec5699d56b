"""Turn the tracer's raw graph into standard ONNX: shape arithmetic folded, norms and rotary embeddings as one operator each.

Every weight keeps its parameter name and its stored form. So nodes that read a parameter are not folded, and parameters of equal
value are not merged (two norms of ones are two parameters).
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript import rewriter
from onnxscript.optimizer._constant_folding import FoldConstantsPass
from onnxscript.rewriter.rules.common import _collapse_slices, _no_op
from onnxscript.rewriter.rules.fusion import _layer_norm, _rotary_embedding

from skipdecode.graph_passes.concat_parts import ConcatPartsPass
from skipdecode.graph_passes.conventions import is_parameter
from skipdecode.graph_passes.drop_empty_products import DropEmptyProductsPass
from skipdecode.graph_passes.drop_group_choice import DropGroupChoicePass
from skipdecode.graph_passes.freeze_reshapes import FreezeReshapesPass
from skipdecode.graph_passes.fuse_backward_rotary import FuseBackwardRotaryPass
from skipdecode.graph_passes.fuse_complex_rotary import FuseComplexRotaryPass
from skipdecode.graph_passes.fuse_halves_rotary import FuseHalvesRotaryPass
from skipdecode.graph_passes.fuse_head_norms import FuseHeadNormsPass
from skipdecode.graph_passes.fuse_interleaved_rotary import FuseInterleavedRotaryPass
from skipdecode.graph_passes.fuse_rms_norm import FuseRMSNormPass
from skipdecode.graph_passes.fuse_tokens_first_rotary import FuseTokensFirstRotaryPass
from skipdecode.graph_passes.fuse_unit_norm import FuseUnitNormPass
from skipdecode.graph_passes.run_passes import run_passes
from skipdecode.graph_passes.turn_weight_first_products import TurnWeightFirstProductsPass
from skipdecode.graph_passes.unflatten_rows import UnflattenRowsPass
from skipdecode.graph_passes.widen_softmax import WidenSoftmaxPass
from skipdecode.graph_passes.widen_states import WidenStatesPass
from skipdecode.graph_passes.write_out_inverse_root import WriteOutInverseRootPass

# without the rule for x + 0, which takes a norm's epsilon of 1e-8 for 0
_SIMPLIFYING_RULES = [
    *_no_op.mul_by_1_rule.commute(),
    _no_op.div_by_1_rule,
    _no_op.dropout_inference_rule,
    *_collapse_slices.rules.rules,
]


def clean_trace(model: ir.Model) -> None:
    """Apply the passes for every traced graph, in place. Initializers with a dot in their names are parameters.

    Raises:
        ModelNotSupportedError: as `run_passes`.
    """
    passes: list[ir.passes.PassBase] = [
        common.InlinePass(),
        ir.passes.PassManager(
            [
                FoldConstantsPass(shape_inference=True, input_size_limit=1024, output_size_limit=1024, should_fold=_should_fold),
                rewriter.RewritePass(_SIMPLIFYING_RULES),
                common.RemoveUnusedNodesPass(),
            ],
            steps=2,
        ),
        common.CommonSubexpressionEliminationPass(),
        WriteOutInverseRootPass(),
        rewriter.RewritePass(_layer_norm.LayerNormFusion.rule().commute()),
        FuseRMSNormPass(),
        FuseUnitNormPass(),
        FuseHeadNormsPass(),
        rewriter.RewritePass([_rotary_embedding.RotaryEmbedding23Fusion.rule()]),
        ConcatPartsPass(),
        FuseTokensFirstRotaryPass(),
        FuseHalvesRotaryPass(),
        FuseBackwardRotaryPass(),
        FuseComplexRotaryPass(),
        FuseInterleavedRotaryPass(),  # also widens rotations of parts of heads, whichever pass fused them
        DropGroupChoicePass(),
        common.RemoveUnusedNodesPass(),
        UnflattenRowsPass(),
        FreezeReshapesPass(),
        DropEmptyProductsPass(),
        TurnWeightFirstProductsPass(),
        WidenSoftmaxPass(),
        WidenStatesPass(),
        common.CommonSubexpressionEliminationPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
        common.ClearMetadataAndDocStringPass(),
    ]
    run_passes(model, passes)


def _should_fold(node: ir.Node) -> bool | None:
    """False for nodes that read a parameter, else None: the folder decides."""
    return False if any(value is not None and value.is_initializer() and is_parameter(value) for value in node.inputs) else None
