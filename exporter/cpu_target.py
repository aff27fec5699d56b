"""Standard graphs -> the cpu target: lowered, perhaps quantised, compiled by ONNX Runtime."""

from __future__ import annotations

import platform
from pathlib import Path

import onnx_ir as ir
import onnxruntime

from skipdecode import manifest
from skipdecode.cpu import cpu_features
from skipdecode.exporter.graphs import StandardGraphs
from skipdecode.exporter.layout import GRAPHS, Report, weight_bytes
from skipdecode.graph_passes.compile_ort import compile_ort
from skipdecode.graph_passes.lower_attention import LowerAttentionPass
from skipdecode.graph_passes.plan import Plan
from skipdecode.graph_passes.quantize_weights import QuantizeWeightsPass
from skipdecode.graph_passes.stitch import stitch
from skipdecode.graph_passes.widen import WidenPass

FOLDER = "targets/cpu"
QUANTIZED_BITS = {"none": None, "int8": 8, "int4": 4}  # --quantize -> bits a weight


def compile_cpu(
    partial: Path, graphs: StandardGraphs, plan: Plan, limits: manifest.Limits, *, quantize: str, own_embed: bool, report: Report
) -> manifest.Target:
    """Write the engines below `partial`, the bundle in the making.

    Args:
        own_embed: give the embedding an engine with weights of its own; else the standard graph is its engine.
    """
    bits = QUANTIZED_BITS[quantize]
    passes: list[ir.passes.PassBase] = [LowerAttentionPass(max_length=limits.max_length)]
    if bits is not None:
        passes.append(QuantizeWeightsPass(bits=bits))
    sizes: dict[str, int] = {}

    def compiled(graph: ir.Model, name: str, *passes: ir.passes.PassBase) -> str:
        lowered = graph.clone()
        ir.passes.Sequential(WidenPass(), *passes)(lowered)
        path = f"{FOLDER}/{name}.onnx"
        sizes[path] = weight_bytes(lowered.graph)
        _compile(partial, lowered, path, prepack=bits is None)
        return path

    (partial / FOLDER).mkdir(parents=True)
    segments = []
    for index, layers in enumerate(plan.segments):
        report(f"compiling segment {index + 1} of {len(plan.segments)} for cpu", index / len(plan.segments))
        name = f"segment_{index:03d}"
        segments.append(compiled(stitch([graphs.layers[layer] for layer in layers], name=name), name, *passes))
    report("compiling head for cpu", 1.0)
    head = compiled(graphs.head, "head", *passes)
    narrow = graphs.embed.graph.outputs[0].dtype != ir.DataType.FLOAT
    return manifest.Target(
        name="cpu", weights="fp32" if bits is None else quantize,
        library="onnxruntime", library_version=onnxruntime.__version__, machine=platform.machine(), cpu_features=cpu_features(),
        embed=compiled(graphs.embed, "embed") if own_embed or narrow else f"{GRAPHS}/embed.onnx",
        segments=tuple(segments), head=head,
        segment_weight_bytes=tuple(sizes[path] for path in segments), head_weight_bytes=sizes[head],
    )  # fmt: skip


def _compile(partial: Path, lowered: ir.Model, path: str, *, prepack: bool) -> None:
    source = partial / GRAPHS / "lowered.onnx"  # beside the weights that it refers to
    by_reference = all(_stored(value.const_value) for value in lowered.graph.initializers.values())
    ir.save(lowered, source, external_data=None if by_reference else "lowered.bin")
    compile_ort(source, partial / path, prepack=prepack)
    for file in (source, source.with_suffix(".bin")):
        file.unlink(missing_ok=True)


def _stored(tensor: ir.TensorProtocol | None) -> bool:
    """Whether a tensor needs no file of its own: it lies in the bundle's weights, or is small."""
    return tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.nbytes < 1 << 20
