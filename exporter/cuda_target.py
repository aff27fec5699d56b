"""Standard graphs -> the cuda target: lowered for ONNX Runtime's CUDA provider, in fp16 or bf16, quantised on request.

No GPU is needed here, because the provider chooses kernels and their tuning when it loads an engine. An engine is therefore just
the lowered graph and its weights, and one bundle serves every GPU that the installed onnxruntime-gpu supports.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import onnxruntime

from skipdecode import manifest
from skipdecode.exporter.graphs import StandardGraphs, segment_graphs
from skipdecode.exporter.job import Job
from skipdecode.exporter.layout import Report, lower_and_write, save_engine, save_tied
from skipdecode.graph_passes.fit_products_to_cutlass import FitProductsToCutlassPass
from skipdecode.graph_passes.fuse_narrow_rotary import FuseNarrowRotaryPass
from skipdecode.graph_passes.fuse_router import FuseRouterPass
from skipdecode.graph_passes.fuse_skip_norm import FuseSkipNormPass
from skipdecode.graph_passes.lower_attention import LowerAttentionPass
from skipdecode.graph_passes.lower_experts import LowerExpertsPass
from skipdecode.graph_passes.lower_linear_attention import LowerLinearAttentionPass
from skipdecode.graph_passes.narrow_operators import NarrowOperatorsPass
from skipdecode.graph_passes.order_qkv import OrderQKVPass
from skipdecode.graph_passes.pack_qkv import PackQKVPass
from skipdecode.graph_passes.quantization import Quantization
from skipdecode.graph_passes.quantize_experts import QuantizeExpertsPass
from skipdecode.graph_passes.quantize_weights import QuantizeWeightsPass
from skipdecode.graph_passes.replace_maximum import ReplaceMaximumPass
from skipdecode.graph_passes.share_tied_weight import ShareTiedWeightPass
from skipdecode.graph_passes.slice_uneven_splits import SliceUnevenSplitsPass
from skipdecode.graph_passes.split_norm_scales import SplitNormScalesPass
from skipdecode.graph_passes.widen_logits import WidenLogitsPass
from skipdecode.graph_passes.widen_operators import WidenOperatorsPass

FOLDER = "targets/cuda"


def compile_cuda(job: Job, partial: Path, graphs: StandardGraphs, report: Report) -> manifest.Target:
    """Write the engines below `partial`, the unfinished bundle.

    Quantisation applies to all multiplied weights. The embedding stays as it is: a GPU reads only one row of it per token.
    """
    quantization = job.quantization
    tied = None if quantization else graphs.tied
    tying_passes = [ShareTiedWeightPass(tied)] if tied else []
    lowering = _lowering_passes(job.limits.max_length, quantization)
    sizes: dict[str, int] = {}

    def compile_engine(graph: ir.Model, name: str, *passes: ir.passes.PassBase) -> str:
        path = f"{FOLDER}/{name}.onnx"
        sizes[path] = lower_and_write(graph, (NarrowOperatorsPass(), *passes), partial / path, save_engine)
        return path

    (partial / FOLDER).mkdir(parents=True)
    segments = []
    for name, graph in segment_graphs(graphs, job.plan, "cuda", report):
        segments.append(compile_engine(graph, name, *lowering))
    report("compiling head for cuda", 1.0)
    outer_passes = _quantize_passes(quantization.outer) if quantization else []
    head = compile_engine(graphs.head, "head", *tying_passes, *outer_passes, WidenLogitsPass())
    tied_weight, tied_bytes = save_tied(tied, graphs.head, partial, FOLDER)
    return manifest.Target(
        name="cuda", weights=quantization.name if quantization else graphs.weights,
        library="onnxruntime", library_version=onnxruntime.__version__, machine="any", cpu_features=(),
        embed=compile_engine(graphs.embed, "embed", *tying_passes), segments=tuple(segments), head=head, tied_weight=tied_weight,
        segment_weight_bytes=tuple(sizes[path] for path in segments), head_weight_bytes=sizes[head] + tied_bytes,
    )  # fmt: skip


def _lowering_passes(max_length: int, quantization: Quantization | None) -> list[ir.passes.PassBase]:
    quantize_passes = [*_quantize_passes(quantization), QuantizeExpertsPass(quantization)] if quantization else []
    # A rotary embedding moves into the attention only once fused. FuseRouterPass needs the MoE of LowerExpertsPass.
    # WidenOperatorsPass follows the passes that would not recognise an operator between casts. OrderQKVPass and PackQKVPass need
    # GroupQueryAttention, and join weights before they are quantised. FuseSkipNormPass takes biases that quantisation would
    # otherwise move into MatMulNBits. SplitNormScalesPass handles norms that are left.
    return [
        FuseNarrowRotaryPass(),
        LowerAttentionPass(max_length=max_length),
        LowerLinearAttentionPass(),
        SliceUnevenSplitsPass(),
        ReplaceMaximumPass(),
        LowerExpertsPass(),
        FuseRouterPass(),
        WidenOperatorsPass(),
        OrderQKVPass(),
        PackQKVPass(),
        FuseSkipNormPass(),
        SplitNormScalesPass(),
        *quantize_passes,
    ]


def _quantize_passes(quantization: Quantization) -> list[ir.passes.PassBase]:
    return [QuantizeWeightsPass(quantization), FitProductsToCutlassPass()]
