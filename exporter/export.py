"""checkpoint -> bundle: the whole way, one function an arrow."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from skipdecode import manifest
from skipdecode.errors import BundleError, ModelNotSupportedError, TargetError
from skipdecode.exporter.architectures import SOFTMAX_ROUTED, key_sources, run_on_cpu_alone
from skipdecode.exporter.checkpoint import checkpoint_source
from skipdecode.exporter.cpu_target import compile_cpu
from skipdecode.exporter.cuda_target import compile_cuda
from skipdecode.exporter.dry_run import check_runs
from skipdecode.exporter.graphs import Skeleton, StandardGraphs, layer_graphs, outer_graphs, skeleton
from skipdecode.exporter.layout import GRAPHS, Report
from skipdecode.exporter.model_names import fetch_checkpoint, is_utf8, load_config
from skipdecode.exporter.output_folder import check_out, fresh_folder, real_out
from skipdecode.exporter.quantization_config import in_few_bits
from skipdecode.exporter.supported import check_supported
from skipdecode.exporter.targets import TargetRequest, choose_dtype, parse_targets
from skipdecode.exporter.tensorrt_target import check_tensorrt, compile_tensorrt
from skipdecode.exporter.tokenizer_files import copy_tokenizer, end_ids
from skipdecode.exporter.weights import WeightFile, random_source, write_weights
from skipdecode.graph_passes.compile_ort import check_packs_quantised
from skipdecode.graph_passes.compile_tensorrt import BuilderOptions
from skipdecode.graph_passes.plan import Plan, plan_variants
from skipdecode.graph_passes.quantize_weights import BLOCK_SIZES, METHODS, Quantization
from skipdecode.graph_passes.stitch import stitch
from skipdecode.model import Model, check_sources
from skipdecode.schedule import Schedule
from skipdecode.schedule_builders import ScheduleRequest, build_schedule

DEFAULT_MAX_LENGTH = 2048
# Most compiled weights of a segment. On a CPU reading 256 MiB takes ~7 ms, a border 0.1 ms at most, and more cost memory at
# export, as they do while plans are built. A GPU reads them in 0.06 ms, and a border is 9 us: sum and norm are not fused.
SEGMENT_BYTES, CUDA_SEGMENT_BYTES = 256 << 20, 2 << 30
QUANTIZED_BITS = {"none": None, "int8": 8, "int4": 4}  # --quantize -> bits a weight
_EXPERTS = "experts.down_proj"  # what transformers calls their matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export, and where to."""

    model: str  # local folder, hub id, or opt-SIZE
    out: Path
    schedule: ScheduleRequest = field(default_factory=ScheduleRequest)
    max_batch: int = 16  # rows
    max_length: int | None = None  # tokens of a row; None: what the model has, at most 2048
    targets: tuple[str, ...] = ("cpu",)  # as --target takes them: tensorrt-rtx:sm89
    dtype: str = "auto"  # auto, fp32, fp16, bf16
    quantize: str = "none"  # none, int8, int4: weight-only
    quantize_method: str = "rtn"  # rtn, k-quant
    quantize_block: int = 32  # inputs that share one scale: 32, 64, 128
    builder: BuilderOptions = field(default_factory=BuilderOptions)  # of TensorRT's targets
    random_weights: bool = False
    segment_bytes: int | None = None  # most compiled weights of a segment; None: what suits the targets
    slim: bool = False  # leave out what the targets do not read
    force: bool = False  # replace `out`


def export(request: ExportRequest, report: Report = lambda what, done: None) -> manifest.Manifest:
    """Export a Hugging Face decoder to a bundle; `request.out` appears complete or not at all.

    Raises:
        ModelNotSupportedError, ScheduleError, TargetError, BundleError: before anything is written where that can be known.
    """
    request = replace(request, out=real_out(request.out))
    _check_options(request)
    check_out(request.out, request.force)
    targets = parse_targets(request.targets)
    config, folder = load_config(request.model)
    dtype = choose_dtype(request.dtype, targets, config)
    limits = manifest.Limits(max_length=_max_length(request, config), max_batch=request.max_batch)
    check_supported(config, limits.max_length)
    schedule = _schedule(request, config)
    bones = skeleton(config, dtype)
    check_runs(config)
    _check_capacity(request, targets, bones, limits)
    if folder is None and not request.random_weights:
        folder = fetch_checkpoint(request.model)
        bones = skeleton(load_config(str(folder))[0], dtype)  # anew: what a checkpoint ties is seen in it alone
    ends = tuple(id_ for id_ in end_ids(folder, config) if 0 <= id_ < config.vocab_size)  # some write -1 for none
    with fresh_folder(request.out, request.force) as partial:
        copy_tokenizer(folder, partial, config, limits.max_length)
        report("reading weights", 0.0)
        source = random_source() if request.random_weights or folder is None else checkpoint_source(folder, bones)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            report("writing weights", 0.4 * done / (dtype.itemsize * bones.num_parameters))

        (partial / GRAPHS).mkdir()
        weights = write_weights(partial / GRAPHS, bones.shapes, dtype, source, advance, where=str(folder))
        layer_bytes = int(bones.layer_bytes * _compiled_itemsize(request, bones) / dtype.itemsize)
        most = max(1, _segment_bytes(request, targets) // layer_bytes)
        plan = plan_variants(schedule, max_layers_per_segment=most, border=bones.first_keeping_none)
        graphs, variants = _write_graphs(partial, bones, weights, plan, report)
        quantization = _quantization(request, bones.config)
        compiled = []
        for index, target in enumerate(targets):
            part = _part_of(report, 0.5 + 0.5 * index / len(targets), 0.5 / len(targets))
            compiled.append(_compile(target, partial, request, graphs, plan, limits, schedule, quantization, part))
        if request.slim:
            shutil.rmtree(partial / GRAPHS)
            variants = dict.fromkeys(variants)
        return _write_manifest(partial, request, bones, ends, schedule, plan, limits, variants, compiled)


def _compile(
    target: TargetRequest,
    partial: Path,
    request: ExportRequest,
    graphs: StandardGraphs,
    plan: Plan,
    limits: manifest.Limits,
    schedule: Schedule,
    quantization: Quantization | None,
    report: Report,
) -> manifest.Target:
    if target.is_tensorrt:
        return compile_tensorrt(
            partial, graphs, plan, limits, schedule, target,
            options=request.builder, replaced=request.out, report=report,
        )  # fmt: skip
    if target.name == "cuda":
        return compile_cuda(partial, graphs, plan, limits, quantization=quantization, report=report)
    return compile_cpu(partial, graphs, plan, limits, quantization=quantization, own_embed=request.slim, report=report)


def _schedule(request: ExportRequest, config: Any) -> Schedule:
    """With as many warm-up layers as the model's layers need that read the keys and values of others."""
    sources = key_sources(config)
    warmup = max(request.schedule.warmup_layers, *(source + 1 for source in sources), 0)
    schedule = build_schedule(replace(request.schedule, warmup_layers=warmup), config.num_hidden_layers)
    check_sources(sources, schedule)  # a table says its own
    return schedule


def _segment_bytes(request: ExportRequest, targets: Sequence[TargetRequest]) -> int:
    """One division into segments serves all targets."""
    own = CUDA_SEGMENT_BYTES if all(target.name == "cuda" for target in targets) else SEGMENT_BYTES
    return request.segment_bytes or own


def _quantization(request: ExportRequest, config: Any) -> Quantization | None:
    """Checkpoints of 4 bits leave embedding and head as they were, which would be nearly all of the error in 4 bits."""
    bits = QUANTIZED_BITS[request.quantize]
    if bits is None:
        return None
    outer = 8 if in_few_bits(config) else None
    return Quantization(bits=bits, method=request.quantize_method, block_size=request.quantize_block, outer_bits=outer)


def _compiled_itemsize(request: ExportRequest, bones: Skeleton) -> float:
    """Bytes of a weight in engines; quantised ones with their scales."""
    bits = QUANTIZED_BITS[request.quantize]
    return bones.dtype.itemsize if bits is None else (bits + 1) / 8


def _check_options(request: ExportRequest) -> None:
    if not is_utf8(request.out):
        raise BundleError(
            "is no UTF-8, which tokenizers and ONNX Runtime take alone", "choose another --out", where=str(request.out)
        )
    if request.quantize not in QUANTIZED_BITS:
        raise TargetError(f"{request.quantize!r} is unknown", f"choose one of {', '.join(QUANTIZED_BITS)}", where="--quantize")
    if request.quantize_method not in METHODS:
        choices = f"choose one of {', '.join(METHODS)}"
        raise TargetError(f"{request.quantize_method!r} is unknown", choices, where="--quantize-method")
    if request.quantize_block not in BLOCK_SIZES:
        choices = f"choose one of {', '.join(map(str, BLOCK_SIZES))}"
        raise TargetError(f"{request.quantize_block} is no block size", choices, where="--quantize-block")
    workspace, level = request.builder.workspace_mib, request.builder.optimization_level
    if workspace is not None and workspace < 1:
        raise TargetError(f"{workspace} MiB is no workspace", "choose 1 or more", where="--workspace")
    if level is not None and not 0 <= level <= 5:
        raise TargetError(f"{level} is unknown", "choose 0 (builds fastest) to 5 (runs fastest)", where="--optimization-level")
    if request.max_batch < 1:
        raise TargetError(f"{request.max_batch} is not a positive count", "choose 1 or more", where="--max-batch")


def _max_length(request: ExportRequest, config: Any) -> int:
    if request.max_length is not None:
        if request.max_length < 2:
            raise ModelNotSupportedError(
                f"{request.max_length} leaves no token to generate", "choose 2 or more", where="--max-length"
            )
        return request.max_length
    longest = getattr(config, "max_position_embeddings", None)
    return min(DEFAULT_MAX_LENGTH, longest) if isinstance(longest, int) and longest > 0 else DEFAULT_MAX_LENGTH


def _check_capacity(request: ExportRequest, targets: Sequence[TargetRequest], bones: Skeleton, limits: manifest.Limits) -> None:
    what = run_on_cpu_alone(bones.config)
    if what is not None and any(target.name != "cpu" for target in targets):
        message = f"{bones.config.model_type} has {what}, which is run on cpu alone"
        raise TargetError(message, "choose cpu", where="--target")
    if any(parameter.endswith(_EXPERTS) for parameter in bones.shapes):
        _check_mixture(request, targets, bones)
    if not any(target.is_tensorrt for target in targets):
        if request.builder != BuilderOptions():
            raise TargetError(
                "--workspace and --optimization-level are for TensorRT's builder", "add --target tensorrt-rtx, or leave them out"
            )
    else:
        check_tensorrt(bones, limits)
        if request.quantize != "none":
            raise TargetError(
                f"{request.quantize} weights are for cpu and cuda engines only", "leave out --quantize, or export two bundles",
                where="--quantize",
            )  # fmt: skip
    if request.quantize != "none":
        if any(target.name == "cpu" for target in targets):
            check_packs_quantised()
        _check_block(request.quantize_block, bones)
    _check_disk(request, targets, bones)


def _check_mixture(request: ExportRequest, targets: Sequence[TargetRequest], bones: Skeleton) -> None:
    """What ONNX Runtime's CUDA kernels of mixtures do not take; TensorRT has none."""
    name = bones.config.model_type
    if any(target.is_tensorrt for target in targets):
        raise TargetError(f"{name} is a mixture, which TensorRT has no layer for", "choose cpu or cuda", where="--target")
    if not any(target.name == "cuda" for target in targets):
        return
    if name not in SOFTMAX_ROUTED:
        raise TargetError(f"{name} chooses its experts as no CUDA kernel of ONNX Runtime does", "choose cpu", where="--target")
    multiple = 8 if request.quantize == "none" else 64  # 128 bits of a row; a tile of weights that are packed at load
    for width, what in _widths(bones).items():
        if width % multiple:
            remedy = "choose cpu" if width % 8 else "leave out --quantize, or choose cpu"
            raise TargetError(f"the {what} {width} is no multiple of {multiple}, as cuda needs it", remedy, where="--target")


def _widths(bones: Skeleton) -> dict[int, str]:
    """Of the inputs of nearly all weights."""
    hidden = bones.config.hidden_size
    matrices = (shape for name, shape in bones.shapes.items() if name.endswith(_EXPERTS))
    experts = {size for shape in matrices for size in shape[1:]}  # [E,H,I], or turned, or between an H that is projected
    return dict.fromkeys(experts, "width of the experts") | {hidden: "hidden size"}


def _check_block(block: int, bones: Skeleton) -> None:
    """Other matrices may stay as they are where blocks do not fit."""
    for width, what in _widths(bones).items():
        if width % block:
            raise TargetError(
                f"the {what} {width} is no multiple of {block}, so the weights would stay as they are",
                "choose a smaller one" if block > BLOCK_SIZES[0] else "leave out --quantize",
                where="--quantize-block",
            )


def _check_disk(request: ExportRequest, targets: Sequence[TargetRequest], bones: Skeleton) -> None:
    """Weights once as source, once a target, quantised or not, on cpu plain and packed; the largest segment on its way."""
    out, itemsize = request.out, _compiled_itemsize(request, bones)
    parent = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    fp32 = request.quantize == "none"
    cpu = 2 * 4 if fp32 else 2.2 * itemsize  # a quantised block's packed form holds its levels' sum too
    compiled = sum(cpu if target.name == "cpu" else itemsize for target in targets)
    layer = bones.layer_bytes // bones.dtype.itemsize * itemsize
    segment = min(max(_segment_bytes(request, targets), layer), itemsize * bones.num_parameters)
    needed = int((bones.dtype.itemsize + compiled) * bones.num_parameters + segment)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise BundleError(
            f"{free >> 20} MiB are free, the bundle needs {needed >> 20} MiB", "free some or choose another --out", where=str(out)
        )


def _part_of(report: Report, start: float, share: float) -> Report:
    return lambda what, done: report(what, start + share * done)


def _write_graphs(
    partial: Path, bones: Skeleton, weights: WeightFile, plan: Plan, report: Report
) -> tuple[StandardGraphs, dict[int, str | None]]:
    """Write the standard graphs; returns them, and the path of each variant's whole graph by its layer count."""
    report("tracing embedding and head", 0.4)
    embed, head = outer_graphs(bones, weights)
    report("tracing layers", 0.42)
    graphs = StandardGraphs(embed=embed, layers=tuple(layer_graphs(bones, weights)), head=head)
    for graph in (embed, *graphs.layers, head):
        ir.save(graph, partial / GRAPHS / f"{graph.graph.name}.onnx")
    variants: dict[int, str | None] = {}
    for count, indices in plan.variants:
        chosen = [graphs.layers[layer] for index in indices for layer in plan.segments[index]]
        path = f"{GRAPHS}/v{count}.onnx"
        ir.save(stitch([embed, *chosen, head], name=f"v{count}"), partial / path)
        variants[count] = path
    return graphs, variants


def _write_manifest(
    partial: Path,
    request: ExportRequest,
    bones: Skeleton,
    ends: tuple[int, ...],
    schedule: Schedule,
    plan: Plan,
    limits: manifest.Limits,
    variants: dict[int, str | None],
    targets: Sequence[manifest.Target],
) -> manifest.Manifest:
    config = bones.config
    paths = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
    result = manifest.Manifest(
        format_version=manifest.FORMAT_VERSION,
        model=Model(
            name=Path(request.model).name,
            model_type=config.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=bones.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=bones.keys.num_heads,
            head_size=bones.keys.head_size,
            state_layers=bones.state_layers,
            vocab_size=bones.vocab_size,
            num_parameters=bones.num_parameters,
            eos_token_ids=ends,
        ),
        dtype=str(bones.dtype).removeprefix("torch."),
        limits=limits,
        schedule=schedule,
        kv_slots=tuple(schedule.cap(layer) for layer in range(schedule.num_layers)),
        segments=plan.segments,
        variants=tuple(
            manifest.Variant(name=f"v{count}", num_layers=count, segments=indices, graph=variants[count])
            for count, indices in plan.variants
        ),
        targets=tuple(targets),
        files=tuple(manifest.describe_file(partial, path) for path in paths),
    )  # fmt: skip
    manifest.write(result, partial)
    return result
