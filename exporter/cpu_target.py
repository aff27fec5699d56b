"""Standard graphs -> the cpu target: lowered, quantised on request, compiled by ONNX Runtime."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import onnx_ir as ir
import onnxruntime

from skipdecode import manifest
from skipdecode.cpu import cpu_features
from skipdecode.exporter.graphs import StandardGraphs, segment_graphs
from skipdecode.exporter.job import Job
from skipdecode.exporter.layout import Report, Write, lower_and_write, move_to_file, remove_lowered, save_engine
from skipdecode.graph_passes.choose_attention_kernel import ChooseAttentionKernelPass
from skipdecode.graph_passes.compile_ort import compile_ort
from skipdecode.graph_passes.fuse_router import FuseRouterPass
from skipdecode.graph_passes.fuse_skip_norm import FuseSkipNormPass
from skipdecode.graph_passes.lower_attention import LowerAttentionPass
from skipdecode.graph_passes.lower_experts import LowerExpertsPass
from skipdecode.graph_passes.lower_linear_attention import LowerLinearAttentionPass
from skipdecode.graph_passes.order_qkv import OrderQKVPass
from skipdecode.graph_passes.pack_qkv import PackQKVPass
from skipdecode.graph_passes.quantization import Quantization
from skipdecode.graph_passes.quantize_embedding import QuantizeEmbeddingPass
from skipdecode.graph_passes.quantize_experts import QuantizeExpertsPass
from skipdecode.graph_passes.quantize_weights import QuantizeWeightsPass
from skipdecode.graph_passes.scan_channels import ScanChannelsPass
from skipdecode.graph_passes.split_experts import SplitExpertsPass
from skipdecode.graph_passes.widen_graph import WidenGraphPass

FOLDER = "targets/cpu"


def compile_cpu(job: Job, partial: Path, graphs: StandardGraphs, report: Report) -> manifest.Target:
    """Write the engines below `partial`, the unfinished bundle, in fp32 or quantised.

    Quantisation applies to the embedding and to all multiplied weights.
    """
    quantization = job.quantization
    lowering = _lowering_passes(job.limits.max_length)
    sizes: dict[str, int] = {}
    write_with_ort = functools.partial(_compile, partial / manifest.GRAPHS / "lowered.onnx")  # next to the weights it refers to

    def compile_engine(graph: ir.Model, name: str, *passes: ir.passes.PassBase, write: Write = write_with_ort) -> str:
        path = f"{FOLDER}/{name}.onnx"
        sizes[path] = lower_and_write(graph, (WidenGraphPass(), *passes), partial / path, write)
        return path

    (partial / FOLDER).mkdir(parents=True)
    segments = []
    for name, graph in segment_graphs(graphs, job.plan, "cpu", report):
        segments.append(compile_engine(graph, name, *lowering, *_quantize_passes(quantization)))
    report("compiling head for cpu", 1.0)
    head = compile_engine(graphs.head, "head", *lowering, *_quantize_passes(quantization and quantization.outer))
    if quantization:  # saved as it is, since ONNX Runtime has nothing to fold in it; a tied table is stored once, with the head
        quantize_passes = QuantizeEmbeddingPass(quantization.outer), QuantizeWeightsPass(quantization.outer)
        write_sharing = functools.partial(save_engine, shared_with=partial / FOLDER / "head.onnx")
        embed = compile_engine(graphs.embed, "embed", *quantize_passes, write=write_sharing)
    elif job.request.slim or graphs.embed.graph.outputs[0].dtype != ir.DataType.FLOAT:
        embed = compile_engine(graphs.embed, "embed")
    else:  # the standard graph serves as engine, so that its weights are not written twice
        embed = f"{manifest.GRAPHS}/embed.onnx"
    return manifest.Target(
        name="cpu", weights=quantization.name if quantization else "fp32",
        library="onnxruntime", library_version=onnxruntime.__version__, machine=platform.machine(), cpu_features=cpu_features(),
        embed=embed, segments=tuple(segments), head=head, tied_weight=None,
        segment_weight_bytes=tuple(sizes[path] for path in segments), head_weight_bytes=sizes[head],
    )  # fmt: skip


def _lowering_passes(max_length: int) -> list[ir.passes.PassBase]:
    # Of linear attention and mixtures, ScanChannelsPass and SplitExpertsPass take what they can as traced, and the next pass
    # lowers the rest. FuseRouterPass needs the MoE of LowerExpertsPass; OrderQKVPass and PackQKVPass need GroupQueryAttention.
    # ChooseAttentionKernelPass hides that operator in branches or scales its query, which PackQKVPass would not see through.
    return [
        LowerAttentionPass(max_length=max_length),
        ScanChannelsPass(),
        LowerLinearAttentionPass(),
        SplitExpertsPass(),
        LowerExpertsPass(),
        FuseRouterPass(),
        OrderQKVPass(),
        PackQKVPass(),
        ChooseAttentionKernelPass(max_length=max_length),
    ]


def _quantize_passes(quantization: Quantization | None) -> list[ir.passes.PassBase]:
    # FuseSkipNormPass last, so that MatMulNBits takes the biases
    return [QuantizeWeightsPass(quantization), QuantizeExpertsPass(quantization), FuseSkipNormPass()] if quantization else []


def _compile(source: Path, lowered: ir.Model, path: Path) -> None:
    move_to_file(lowered.graph.initializers.values(), source.with_suffix(".bin"))
    ir.save(lowered, source)
    compile_ort(source, path)
    remove_lowered(source)
