"""checkpoint -> bundle: the whole way, one function an arrow."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import torch

from skipdecode import manifest
from skipdecode.cpu import cpu_features
from skipdecode.errors import BundleError, ModelNotSupportedError, TargetError
from skipdecode.exporter.architectures import check_supported
from skipdecode.exporter.graphs import Skeleton, layer_graphs, outer_graphs, skeleton
from skipdecode.exporter.model_names import fetch_checkpoint, load_config
from skipdecode.exporter.tokenizer_files import copy_tokenizer
from skipdecode.exporter.weights import WeightFile, checkpoint_source, random_source, write_weights
from skipdecode.graph_passes.compile_ort import compile_ort
from skipdecode.graph_passes.lower_attention import LowerAttentionPass
from skipdecode.graph_passes.plan import Plan, plan_variants
from skipdecode.graph_passes.quantize_weights import QuantizeWeightsPass
from skipdecode.graph_passes.stitch import stitch
from skipdecode.schedule import Schedule
from skipdecode.schedule_builders import ScheduleRequest, build_schedule

GRAPHS = "graphs"  # ONNX Runtime reads weights only from the graph's own folder, so graphs and weights share one
DEFAULT_MAX_LENGTH = 2048
_SEGMENT_BYTES = 256 << 20  # a call costs ~10 us, reading this much ~7 ms: larger segments save nothing but cost memory
_BITS = {"none": None, "int8": 8, "int4": 4}  # --quantize -> bits a weight

Report = Callable[[str, float], None]  # (what is being done, fraction of the export that is done)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export, and where to."""

    model: str  # local folder, hub id, or opt-SIZE
    out: Path
    schedule: ScheduleRequest = field(default_factory=ScheduleRequest)
    max_batch: int = 16  # rows
    max_length: int | None = None  # tokens of a row; None: what the model has, at most 2048
    targets: tuple[str, ...] = ("cpu",)
    dtype: str = "auto"  # auto, fp32
    quantize: str = "none"  # none, int8, int4: weight-only, blocks of 32
    random_weights: bool = False
    slim: bool = False  # leave out what the targets do not read
    force: bool = False  # replace `out`


def export(request: ExportRequest, report: Report = lambda what, done: None) -> manifest.Manifest:
    """Export a Hugging Face decoder to a bundle; `request.out` appears complete or not at all.

    Raises:
        ModelNotSupportedError, ScheduleError, TargetError, BundleError: before anything is written where that can be known.
    """
    _check_options(request)
    config, folder = load_config(request.model)
    limits = manifest.Limits(max_length=_max_length(request, config), max_batch=request.max_batch)
    check_supported(config, limits.max_length)
    schedule = build_schedule(request.schedule, config.num_hidden_layers)
    bones = skeleton(config)
    _check_disk(request.out, bones, _BITS[request.quantize])
    if folder is None and not request.random_weights:
        folder = fetch_checkpoint(request.model)
    with ExitStack() as files, _fresh_folder(request.out, request.force) as partial:
        report("reading weights", 0.0)
        prefix = bones.parts.prefix.split(".")[0]
        source = random_source() if request.random_weights or folder is None else checkpoint_source(folder, prefix, files)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            report("writing weights", 0.4 * done / (4 * _num_parameters(bones)))

        (partial / GRAPHS).mkdir()
        weights = write_weights(partial / GRAPHS, bones.shapes, torch.float32, source, advance)
        plan = _plan(bones, schedule)
        written = _write_bundle(partial, bones, weights, plan, _Compiler(partial, limits, _BITS[request.quantize]), report)
        copy_tokenizer(folder, partial, config, limits.max_length)
        if request.slim:
            written = _slim(partial, written)
        return _write_manifest(partial, request, bones, schedule, plan, limits, written)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """Paths inside the bundle."""

    embed: str
    segments: tuple[str, ...]
    head: str
    variants: dict[int, str | None]
    weight_bytes: dict[str, int]  # of each engine


@dataclass(frozen=True, slots=True)
class _Compiler:
    """Lowers and compiles graphs for the cpu target."""

    partial: Path  # the bundle in the making
    limits: manifest.Limits
    bits: int | None  # of a quantised weight
    weight_bytes: dict[str, int] = field(default_factory=dict)  # of each engine compiled so far

    def compile(self, graph: ir.Model, path: str) -> str:
        """Compile a standard graph to the engine `path` of the bundle; returns the path."""
        lowered = graph.clone()
        passes: list[ir.passes.PassBase] = [LowerAttentionPass(max_length=self.limits.max_length)]
        if self.bits is not None:
            passes.append(QuantizeWeightsPass(bits=self.bits))
        ir.passes.Sequential(*passes)(lowered)
        self.weight_bytes[path] = _weight_bytes(lowered.graph)
        source = self.partial / GRAPHS / "lowered.onnx"
        ir.save(lowered, source, external_data="lowered.bin" if self.bits is not None else None)
        compile_ort(source, self.partial / path, prepack=self.bits is None)
        for file in (source, source.with_suffix(".bin")):
            file.unlink(missing_ok=True)
        return path


def _weight_bytes(graph: ir.Graph) -> int:
    """What a step reads whole: not the rotary tables, of which attention takes a row a position."""
    weights = (
        value.const_value.nbytes
        for value in graph.initializers.values()
        if value.const_value is not None and not any(use.node.op_type == "GroupQueryAttention" for use in value.uses())
    )
    return sum(weights)


def _check_options(request: ExportRequest) -> None:
    unknown = [target for target in request.targets if target != "cpu"]
    if unknown:
        raise TargetError(f"target {unknown[0]!r} cannot be compiled by this version", "available: cpu", where="--target")
    if request.dtype not in ("auto", "fp32"):
        raise TargetError(f"{request.dtype} on cpu: ONNX Runtime has no kernel for it", "choose fp32", where="--dtype")
    if request.quantize not in _BITS:
        raise TargetError(f"{request.quantize!r} is unknown", f"choose one of {', '.join(_BITS)}", where="--quantize")
    if request.max_batch < 1:
        raise TargetError(f"{request.max_batch} is not a positive count", "choose 1 or more", where="--max-batch")
    if request.out.exists() and not request.force:
        raise BundleError("exists already", "choose another --out, or replace it with --force", where=str(request.out))
    if request.out.exists() and not (request.out / manifest.MANIFEST).is_file() and any(request.out.iterdir()):
        raise BundleError(
            "exists and is not a bundle, so --force does not replace it", "choose another --out", where=str(request.out)
        )


def _max_length(request: ExportRequest, config: Any) -> int:
    if request.max_length is not None:
        if request.max_length < 2:
            raise ModelNotSupportedError(
                f"{request.max_length} leaves no token to generate", "choose 2 or more", where="--max-length"
            )
        return request.max_length
    known = (getattr(config, name, None) for name in ("max_position_embeddings", "sliding_window"))
    return min([DEFAULT_MAX_LENGTH, *(int(length) for length in known if length)])


def _num_parameters(bones: Skeleton) -> int:
    return sum(math.prod(shape) for shape in bones.shapes.values())


def _check_disk(out: Path, bones: Skeleton, bits: int | None) -> None:
    """Weights once as source, compiled twice (plain and prepacked) or once quantised; one segment on its way."""
    parent = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    compiled = 2 * 4 if bits is None else (bits + 1) / 8
    needed = int((4 + compiled) * _num_parameters(bones)) + _SEGMENT_BYTES
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise BundleError(
            f"{free >> 20} MiB are free, the bundle needs {needed >> 20} MiB", "free some or choose another --out", where=str(out)
        )


@contextmanager
def _fresh_folder(out: Path, force: bool) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when all went well, and vanishes when not."""
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        if out.exists():
            old = out.with_name(f".{out.name}.old-{os.getpid()}")
            out.rename(old)
            partial.rename(out)
            shutil.rmtree(old)
        else:
            partial.rename(out)
    except OSError as error:
        raise BundleError(
            f"cannot be written ({error.strerror or error})", "free space or choose another --out", where=str(out)
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _plan(bones: Skeleton, schedule: Schedule) -> Plan:
    return plan_variants(schedule, max_layers_per_segment=max(1, _SEGMENT_BYTES // bones.layer_bytes(4)))


def _write_bundle(
    partial: Path, bones: Skeleton, weights: WeightFile, plan: Plan, compiler: _Compiler, report: Report
) -> _Written:
    report("tracing embedding and head", 0.4)
    embed, head = outer_graphs(bones, weights)
    report("tracing layers", 0.42)
    layers = layer_graphs(bones, weights)
    graphs = partial / GRAPHS
    ir.save(embed, graphs / "embed.onnx")
    ir.save(head, graphs / "head.onnx")
    for layer in layers:
        ir.save(layer, graphs / f"{layer.graph.name}.onnx")
    variants: dict[int, str | None] = {}
    for count, indices in plan.variants:
        chosen = [layers[layer] for index in indices for layer in plan.segments[index]]
        path = f"{GRAPHS}/v{count}.onnx"
        ir.save(stitch([embed, *chosen, head], name=f"v{count}"), partial / path)
        variants[count] = path
    target = partial / "targets" / "cpu"
    target.mkdir(parents=True)
    engines = []
    for index, segment in enumerate(plan.segments):
        report(f"compiling segment {index + 1} of {len(plan.segments)}", 0.5 + 0.45 * index / len(plan.segments))
        graph = stitch([layers[layer] for layer in segment], name=f"segment_{index:03d}")
        engines.append(compiler.compile(graph, f"targets/cpu/segment_{index:03d}.onnx"))
    report("compiling head", 0.95)
    return _Written(
        embed=f"{GRAPHS}/embed.onnx",
        segments=tuple(engines),
        head=compiler.compile(head, "targets/cpu/head.onnx"),
        variants=variants,
        weight_bytes=compiler.weight_bytes,
    )


def _slim(partial: Path, written: _Written) -> _Written:
    """Keep only what the engines read: the embedding gets its own copy of its weights, the standard graphs go."""
    embed = "targets/cpu/embed.onnx"
    compile_ort(partial / written.embed, partial / embed)
    shutil.rmtree(partial / GRAPHS)
    return dataclasses.replace(written, embed=embed, variants=dict.fromkeys(written.variants))


def _eos_ids(partial: Path, config: Any) -> tuple[int, ...]:
    from transformers import GenerationConfig

    known = GenerationConfig.from_pretrained(partial) if (partial / "generation_config.json").is_file() else config
    ids = known.eos_token_id
    return tuple(ids) if isinstance(ids, list) else (ids,) if ids is not None else ()


def _write_manifest(
    partial: Path,
    request: ExportRequest,
    bones: Skeleton,
    schedule: Schedule,
    plan: Plan,
    limits: manifest.Limits,
    written: _Written,
) -> manifest.Manifest:
    config = bones.config
    paths = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
    result = manifest.Manifest(
        format_version=manifest.FORMAT_VERSION,
        model=manifest.Model(
            name=Path(request.model).name,
            model_type=config.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=bones.num_kv_heads,
            head_size=bones.head_size,
            vocab_size=bones.vocab_size,
            num_parameters=_num_parameters(bones),
            eos_token_ids=_eos_ids(partial, config),
        ),
        dtype="float32",
        limits=limits,
        schedule=schedule,
        kv_slots=tuple(schedule.cap(layer) for layer in range(schedule.num_layers)),
        segments=plan.segments,
        variants=tuple(
            manifest.Variant(name=f"v{count}", num_layers=count, segments=indices, graph=written.variants[count])
            for count, indices in plan.variants
        ),
        targets=(
            manifest.Target(
                name="cpu",
                weights="fp32" if request.quantize == "none" else request.quantize,
                library="onnxruntime", library_version=onnxruntime.__version__, machine=platform.machine(),
                cpu_features=cpu_features(), embed=written.embed, segments=written.segments, head=written.head,
                segment_weight_bytes=tuple(written.weight_bytes[path] for path in written.segments),
                head_weight_bytes=written.weight_bytes[written.head],
            ),
        ),
        files=tuple(manifest.describe_file(partial, path) for path in paths),
    )  # fmt: skip
    manifest.write(result, partial)
    return result
