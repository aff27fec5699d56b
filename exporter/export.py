"""checkpoint -> bundle: all steps of an export, one function each."""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from skipdecode import manifest
from skipdecode.exporter.architectures import key_sources, num_heads
from skipdecode.exporter.check_request import check_request
from skipdecode.exporter.checkpoint import CheckpointSource
from skipdecode.exporter.cpu_target import compile_cpu
from skipdecode.exporter.cuda_target import compile_cuda
from skipdecode.exporter.dry_run import check_runs
from skipdecode.exporter.feasible import check_feasible, choose_max_length, max_layers_per_segment
from skipdecode.exporter.generation_config import end_ids, warn_of_unapplied
from skipdecode.exporter.graphs import StandardGraphs, layer_graphs, outer_graphs
from skipdecode.exporter.job import Job
from skipdecode.exporter.layout import Report
from skipdecode.exporter.merge_adapter import AdaptedSource
from skipdecode.exporter.model_names import checkpoint_config, fetch_checkpoint, load_config
from skipdecode.exporter.output_folder import check_outside, fresh_folder, real_out
from skipdecode.exporter.quantization_config import has_at_most_4_bits
from skipdecode.exporter.request import QUANTIZED_BITS, ExportRequest
from skipdecode.exporter.skeleton import build_skeleton
from skipdecode.exporter.supported import check_supported
from skipdecode.exporter.targets import TargetRequest, choose_dtype
from skipdecode.exporter.tensorrt_target import compile_tensorrt
from skipdecode.exporter.tokenizer_files import copy_settings, copy_tokenizer
from skipdecode.exporter.weights import WeightFile, random_source, write_weights
from skipdecode.graph_passes.plan import plan_variants
from skipdecode.graph_passes.quantization import Quantization
from skipdecode.graph_passes.stitch import stitch
from skipdecode.model import Model, check_sources
from skipdecode.schedule import Schedule
from skipdecode.schedule_builders import build_schedule

__all__ = ["ExportRequest", "export"]
logger = logging.getLogger(__name__)


def export(request: ExportRequest, report: Report = lambda what, done: None) -> manifest.Manifest:
    """Export a Hugging Face decoder to a bundle; `request.out` appears complete or not at all.

    All errors are raised before anything is written, where that can be known.

    Args:
        report: called with what is being done and which fraction of the whole is done, 0 .. 1.

    Returns:
        The bundle's manifest.

    Raises:
        ModelNotSupportedError: the checkpoint cannot be read, or cannot be exported faithfully.
        ScheduleError: the schedule does not fit the model.
        TargetError: a target does not take the model or the options, or its library is missing or rejects a graph.
        BundleError: `request.out` cannot be written, or its disk is too full.
    """
    request = replace(request, out=real_out(request.out))
    targets = check_request(request)
    job = _decide(request, targets, report)
    config = job.skeleton.config
    folder = None if job.checkpoint is None else job.checkpoint.folder
    eos_ids = tuple(id_ for id_ in end_ids(folder, config) if 0 <= id_ < config.vocab_size)  # -1 in some models means none
    warn_of_unapplied(folder)
    with fresh_folder(request.out, request.force) as partial:
        copy_settings(folder, partial, config)
        if job.checkpoint is not None:
            copy_tokenizer(job.checkpoint.tokenizer_folder, partial, config, job.limits.max_length)
        weights = _store_weights(job, partial, report)
        graphs, variants = _write_graphs(job, partial, weights, report)
        compiled_targets = []
        for index, target in enumerate(targets):
            target_report = _scaled_report(report, 0.5 + 0.5 * index / len(targets), 0.5 / len(targets))
            compiled_targets.append(_compile(job, target, partial, graphs, target_report))
        if request.slim:
            shutil.rmtree(partial / manifest.GRAPHS)
            variants = dict.fromkeys(variants)
        return _write_manifest(job, partial, eos_ids, variants, compiled_targets)


def _decide(request: ExportRequest, targets: tuple[TargetRequest, ...], report: Report) -> Job:
    """Decide and check everything that can be known before anything is written; downloads the checkpoint."""
    report(f"looking for {request.model}", 0.0)
    config, checkpoint = load_config(request.model)
    if checkpoint is not None:
        check_outside(request.out, checkpoint.folder, "the checkpoint")
    dtype = choose_dtype(request.dtype, targets, config)
    limits = manifest.Limits(max_length=choose_max_length(request, config), max_batch=request.max_batch)
    check_supported(config, limits.max_length)
    schedule = _schedule(request, config)
    skeleton = build_skeleton(config, dtype)
    check_runs(config)
    check_feasible(request, targets, skeleton, limits, schedule)
    if checkpoint is None and not request.random_weights:
        checkpoint = fetch_checkpoint(request.model, lambda what: report(what, 0.0))
        config = checkpoint_config(checkpoint)  # anew: only weights show what is tied, and in which dtype they are
        skeleton = build_skeleton(config, choose_dtype(request.dtype, targets, config))
        check_feasible(request, targets, skeleton, limits, schedule)  # of this dtype, too
    max_layers = max_layers_per_segment(request, targets, skeleton)
    return Job(
        request=request,
        checkpoint=checkpoint,
        skeleton=skeleton,
        limits=limits,
        schedule=schedule,
        plan=plan_variants(schedule, max_layers_per_segment=max_layers, prompt_border=skeleton.first_layer_keeping_nothing),
        quantization=_quantization(request, targets, skeleton.config),
    )


def _schedule(request: ExportRequest, config: Any) -> Schedule:
    """The schedule, with enough warm-up layers that layers whose keys and values others read are always computed."""
    sources = key_sources(config)
    warmup = request.schedule.warmup_layers
    if sources and warmup >= 0:
        warmup = max(warmup, max(sources) + 1)
    schedule = build_schedule(replace(request.schedule, warmup_layers=warmup), config.num_hidden_layers)
    check_sources(sources, schedule)  # a table may set its own warm-up layers
    return schedule


def _quantization(request: ExportRequest, targets: Sequence[TargetRequest], config: Any) -> Quantization | None:
    """How to quantise; None: not at all.

    Checkpoints in 4 bits leave embedding and head wide. In 4 bits these would make nearly all of the error, so they get 8.
    """
    bits, has_few_bits = QUANTIZED_BITS[request.quantize], has_at_most_4_bits(config)
    if bits is not None:
        return Quantization(
            bits=bits, method=request.quantize_method, block_size=request.quantize_block, outer_bits=8 if has_few_bits else None
        )
    if has_few_bits:
        message = "the checkpoint's weights of 4 bits or less are widened for %s; --quantize int4 keeps them"
        logger.warning(message, " and ".join(target.name for target in targets))
    return None


def _scaled_report(report: Report, start: float, share: float) -> Report:
    return lambda what, done: report(what, start + share * done)


def _store_weights(job: Job, partial: Path, report: Report) -> WeightFile:
    report("reading weights", 0.0)
    skeleton, checkpoint = job.skeleton, job.checkpoint
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report("writing weights", 0.4 * done / (skeleton.dtype.itemsize * skeleton.num_parameters))

    (partial / manifest.GRAPHS).mkdir()
    write = functools.partial(write_weights, partial / manifest.GRAPHS, skeleton.shapes, skeleton.dtype, advance=advance)
    if job.request.random_weights or checkpoint is None:
        return write(random_source())
    stored = CheckpointSource(checkpoint.folder, skeleton)
    source = stored if checkpoint.adapter is None else AdaptedSource(stored, checkpoint.adapter, skeleton)
    weights = write(source, where=str(checkpoint.folder))
    stored.warn_of_unread()
    return weights


def _write_graphs(job: Job, partial: Path, weights: WeightFile, report: Report) -> tuple[StandardGraphs, dict[int, str | None]]:
    """Write the standard graphs; return them, and the path of each variant's whole graph by layer count."""
    report("tracing embedding and head", 0.4)
    embed, head = outer_graphs(job.skeleton, weights)
    report("tracing layers", 0.42)
    graphs = StandardGraphs(embed=embed, layers=tuple(layer_graphs(job.skeleton, weights)), head=head)
    for graph in (embed, *graphs.layers, head):
        ir.save(graph, partial / manifest.GRAPHS / f"{graph.graph.name}.onnx")
    variants: dict[int, str | None] = {}
    for count, indices in job.plan.variants:
        layers = [graphs.layers[layer] for index in indices for layer in job.plan.segments[index]]
        path = f"{manifest.GRAPHS}/v{count}.onnx"
        ir.save(stitch([embed, *layers, head], name=f"v{count}"), partial / path)
        variants[count] = path
    return graphs, variants


def _compile(job: Job, target: TargetRequest, partial: Path, graphs: StandardGraphs, report: Report) -> manifest.Target:
    if target.is_tensorrt:
        return compile_tensorrt(job, target, partial, graphs, report)
    if target.name == "cuda":
        return compile_cuda(job, partial, graphs, report)
    return compile_cpu(job, partial, graphs, report)


def _write_manifest(
    job: Job,
    partial: Path,
    eos_ids: tuple[int, ...],
    variants: dict[int, str | None],
    targets: Sequence[manifest.Target],
) -> manifest.Manifest:
    schedule = job.schedule
    paths = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
    result = manifest.Manifest(
        format_version=manifest.FORMAT_VERSION,
        model=_describe_model(job, eos_ids),
        dtype=str(job.skeleton.dtype).removeprefix("torch."),
        limits=job.limits,
        schedule=schedule,
        kv_slots=tuple(schedule.cap(layer) for layer in range(schedule.num_layers)),
        segments=job.plan.segments,
        variants=tuple(
            manifest.Variant(name=f"v{count}", num_layers=count, segments=indices, graph=variants[count])
            for count, indices in job.plan.variants
        ),
        targets=tuple(targets),
        files=tuple(manifest.describe_file(partial, path) for path in paths),
    )
    manifest.write(result, partial)
    return result


def _describe_model(job: Job, eos_ids: tuple[int, ...]) -> Model:
    skeleton, config = job.skeleton, job.skeleton.config
    return Model(
        name=os.path.basename(os.path.abspath(job.request.model)),  # for `.` the name of the folder
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=skeleton.hidden_size,
        num_heads=num_heads(config),
        num_kv_heads=skeleton.keys.num_heads,
        head_size=skeleton.keys.head_size,
        state_layers=skeleton.state_layers,
        vocab_size=skeleton.vocab_size,
        num_parameters=skeleton.num_parameters,
        eos_token_ids=eos_ids,
    )
