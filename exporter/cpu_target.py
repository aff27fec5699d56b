"""Standard graphs -> the cpu target: lowered, perhaps quantised, compiled by ONNX Runtime."""

from __future__ import annotations

import platform
from pathlib import Path

import onnx_ir as ir
import onnxruntime
from onnx_ir.external_data import convert_tensors_to_external

from skipdecode import manifest
from skipdecode.cpu import cpu_features
from skipdecode.exporter.graphs import StandardGraphs
from skipdecode.exporter.layout import GRAPHS, Report, weight_bytes
from skipdecode.graph_passes.compile_ort import compile_ort
from skipdecode.graph_passes.lower_attention import LowerAttentionPass
from skipdecode.graph_passes.pack_gate_up import PackGateUpPass
from skipdecode.graph_passes.pack_qkv import PackQKVPass
from skipdecode.graph_passes.plan import Plan
from skipdecode.graph_passes.quantize_weights import QuantizeWeightsPass
from skipdecode.graph_passes.stitch import stitch
from skipdecode.graph_passes.widen import WidenPass

FOLDER = "targets/cpu"
QUANTIZED_BITS = {"none": None, "int8": 8, "int4": 4}  # --quantize -> bits a weight


def compile_cpu(
    partial: Path,
    graphs: StandardGraphs,
    plan: Plan,
    limits: manifest.Limits,
    *,
    quantize: str,
    method: str,
    own_embed: bool,
    report: Report,
) -> manifest.Target:
    """Write the engines below `partial`, the bundle in the making.

    Args:
        method: of quantisation, a name of METHODS.
        own_embed: give the embedding an engine with weights of its own; else the standard graph is its engine.
    """
    bits = QUANTIZED_BITS[quantize]
    passes: list[ir.passes.PassBase] = [LowerAttentionPass(max_length=limits.max_length), PackQKVPass(), PackGateUpPass()]
    if bits is not None:
        passes.append(QuantizeWeightsPass(bits=bits, method=method))
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
    made = [value for value in lowered.graph.initializers.values() if _needs_file(value.const_value)]
    tensors = [value.const_value for value in made if value.const_value is not None]
    for value, tensor in zip(made, convert_tensors_to_external(tensors, source.parent, "lowered.bin"), strict=True):
        value.const_value = tensor
    ir.save(lowered, source)
    compile_ort(source, partial / path, prepack=prepack)
    for file in (source, source.with_suffix(".bin")):
        file.unlink(missing_ok=True)


def _needs_file(tensor: ir.TensorProtocol | None) -> bool:
    """Whether a tensor was made by a pass and is too large to stand inside a graph."""
    return tensor is not None and not isinstance(tensor, ir.ExternalTensor) and tensor.nbytes >= 1024
