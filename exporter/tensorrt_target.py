"""Compile standard graphs for a TensorRT target: lower each engine's graph, then build its plan in a process of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from skipdecode import manifest
from skipdecode.cuda_driver import gpu_at_hand
from skipdecode.errors import TargetError
from skipdecode.exporter.architectures import experts_per_token
from skipdecode.exporter.graphs import StandardGraphs
from skipdecode.exporter.job import Job
from skipdecode.exporter.layout import Report, move_to_file, remove_lowered, save_tied, weight_bytes
from skipdecode.exporter.per_layer_inputs import TABLE
from skipdecode.exporter.plan_builders import build_plans, num_builders
from skipdecode.exporter.plan_cache import KEYS, TIMING_CACHE, content_key, keep_timings, known_plans, take_over
from skipdecode.exporter.skeleton import Skeleton
from skipdecode.exporter.state_layers import forgets_by_channel
from skipdecode.exporter.targets import TargetRequest
from skipdecode.graph_passes.avoid_unit_scale import AvoidUnitScalePass
from skipdecode.graph_passes.compile_tensorrt import PlanRequest, Profile, library
from skipdecode.graph_passes.conventions import required_input, static_dim
from skipdecode.graph_passes.drop_unused_inputs import DropUnusedInputsPass
from skipdecode.graph_passes.freeze_slots import FreezeSlotsPass
from skipdecode.graph_passes.pack_products import PackProductsPass
from skipdecode.graph_passes.quantization import Quantization
from skipdecode.graph_passes.quantize_plan_experts import QuantizePlanExpertsPass
from skipdecode.graph_passes.quantize_plan_weights import QuantizePlanWeightsPass
from skipdecode.graph_passes.run_passes import run_passes
from skipdecode.graph_passes.share_tied_weight import ShareTiedWeightPass
from skipdecode.graph_passes.slice_gathers import SliceGathersPass
from skipdecode.graph_passes.split_norm_scales import SplitNormScalesPass
from skipdecode.graph_passes.split_products import SplitProductsPass
from skipdecode.graph_passes.split_table import SplitTablePass
from skipdecode.graph_passes.stitch import stitch
from skipdecode.graph_passes.turn_queries_into_tokens import TurnQueriesIntoTokensPass
from skipdecode.graph_passes.widen_logits import WidenLogitsPass
from skipdecode.graph_passes.write_out_attention import WriteOutAttentionPass, attention_without_kernel
from skipdecode.graph_passes.write_out_convolution import WriteOutConvolutionPass
from skipdecode.graph_passes.write_out_experts import WriteOutExpertsPass
from skipdecode.graph_passes.write_out_linear_attention import WriteOutLinearAttentionPass
from skipdecode.kv_buffer import MIN_SLOTS, static_slots
from skipdecode.model import key_sizes
from skipdecode.prefill import PREFILL_CHUNK
from skipdecode.schedule import Schedule
from skipdecode.targets import PORTABLE

_MAX_ELEMENTS = 2**31 - 1  # of one tensor
HALF_BYTES = 2  # per float of a plan: fp16 or bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    name: str
    graph: ir.Model  # standard
    slots: int  # of its layers' KV buffers
    profiles: tuple[Profile, ...]


def check_tensorrt(skeleton: Skeleton, limits: manifest.Limits, schedule: Schedule) -> None:
    """Refuse, before anything is written, what TensorRT could not build.

    Raises:
        TargetError: linear attention has a decay per channel; or a layer's KV buffer, a weight that cannot be split,
            or the experts that a step looks up have more elements than a tensor may.
    """
    _check_decays(skeleton)
    for name, shape in skeleton.shapes.items():
        if math.prod(shape) > _MAX_ELEMENTS and not name.endswith(f".{TABLE}.weight"):
            raise TargetError(f"{name} has more than 2**31 - 1 elements", "choose cpu or cuda", where="--target")
    width = max((keys.num_heads * keys.head_size for keys in key_sizes(skeleton.state_layers, skeleton.keys)), default=0)
    slots = max(slots_of_plans(skeleton, schedule, limits.max_length))
    limit = _MAX_ELEMENTS // (limits.max_batch * width) if width else slots
    if slots > limit:
        limit -= limit % MIN_SLOTS  # counts of slots are never rounded up past a multiple of it
        raise TargetError(
            f"a KV buffer of {limits.max_batch} rows of {slots} slots has more than 2**31 - 1 elements",
            f"choose --max-length {limit} or less, or a smaller --max-batch" if limit else "choose a smaller --max-batch",
            where="--max-length",
        )
    _check_expert_lookup(skeleton, limits)


def _check_decays(skeleton: Skeleton) -> None:
    """Refuse a decay per channel: `write_out_linear_attention` supports only one per head.

    Griffin's channels are heads of their own, but it makes a matrix of tokens by tokens for each: 2.7 GB with 2560 of them.
    """
    if any(forgets_by_channel(module) for layer in skeleton.parts.layers for module in layer.modules()):
        message = f"{skeleton.config.model_type}'s linear attention has a decay per channel, but plans have one per head"
        raise TargetError(message, "choose cpu or cuda", where="--target")


def _check_expert_lookup(skeleton: Skeleton, limits: manifest.Limits) -> None:
    """Refuse a step whose looked-up experts [B,K,N,H] exceed a tensor's size.

    The kernel (`write_out_experts`) does not store that tensor, but it numbers the elements.
    """
    experts = [math.prod(shape[1:]) for name, shape in skeleton.shapes.items() if ".experts." in name and len(shape) == 3]
    if not experts:
        return
    chosen = experts_per_token(skeleton.config)
    rows = _MAX_ELEMENTS // (max(experts) * (max(chosen) if isinstance(chosen, list) else chosen))
    if limits.max_batch > rows:
        raise TargetError(
            f"the experts that a step of {limits.max_batch} rows looks up have more than 2**31 - 1 elements",
            f"choose --max-batch {rows} or less" if rows else "choose cpu or cuda", where="--max-batch",
        )  # fmt: skip


def compile_tensorrt(job: Job, target: TargetRequest, partial: Path, graphs: StandardGraphs, report: Report) -> manifest.Target:
    """Write the plans below `partial`, the bundle in the making.

    If the job quantises, it does so for the weights of layers and head; the head then shares no weight with the embedding. Plans
    of the same content and the timing cache are taken over from the bundle that this one replaces, if there is one.

    Raises:
        TargetError: the library refuses a graph, or attention has more scores than a tensor may have elements.
    """
    folder = f"targets/{target.name}"
    (partial / folder).mkdir(parents=True)
    engines, tied = _engines(job, graphs), None if job.quantization else graphs.tied
    for engine in engines:
        _check_scores(engine)
    requests = _PlanRequests(job, target, partial, engines, tied)
    build_plans(iter(requests), len(engines), num_builders(target.name, _max_weight_bytes(engines, job.quantization)), report)
    (partial / folder / f"{TIMING_CACHE}.lock").unlink(missing_ok=True)  # left by polygraphy
    (partial / folder / KEYS).write_text(json.dumps(requests.keys, indent=1) + "\n", encoding="utf-8")
    tied_weight, tied_bytes = save_tied(tied, graphs.head, partial, folder)
    embed, head = (f"{folder}/{name}.plan" for name in ("embed", "head"))
    segments = {path: size for path, size in requests.sizes.items() if path not in (embed, head)}
    trt = library(target.name)
    return manifest.Target(
        name=target.name, weights=job.quantization.name if job.quantization else graphs.weights,
        library=trt.__name__, library_version=trt.__version__, machine=requests.gpus[0], cpu_features=(),
        embed=embed, segments=tuple(segments), head=head, tied_weight=tied_weight,
        segment_weight_bytes=tuple(segments.values()), head_weight_bytes=requests.sizes[head] + tied_bytes,
    )  # fmt: skip


def _gpus(target: TargetRequest) -> tuple[str, str]:
    """What plans are built for: compute capabilities, and the GPU's name if they are for the GPU at hand."""
    if target.name == "tensorrt":
        gpu = gpu_at_hand()
        return gpu.capability, gpu.name
    return " ".join(target.capabilities) or PORTABLE, ""


def _max_weight_bytes(engines: Sequence[_Engine], quantization: Quantization | None) -> int:
    """Approximate bytes of the largest plan's weights, estimated from the weights before quantisation."""

    def share(engine: str) -> float:
        if quantization is None or engine == "embed":
            return 1.0
        return ((quantization.outer if engine == "head" else quantization).bits + 1) / 16

    return max(int(weight_bytes(engine.graph.graph) * share(engine.name)) for engine in engines)


def _check_scores(engine: _Engine) -> None:
    """Refuse written-out attention whose scores in a pass over a prompt, one tensor [1,NH,S,C], have too many elements."""
    for node in attention_without_kernel(engine.graph.graph, engine.slots):
        heads, tokens = static_dim(required_input(node), 1), min(PREFILL_CHUNK, engine.slots)
        if heads * tokens * engine.slots > _MAX_ELEMENTS:
            max_slots = _MAX_ELEMENTS // (heads * PREFILL_CHUNK)
            raise TargetError(
                f"the scores of {heads} heads for {tokens} tokens and {engine.slots} slots are more than 2**31 - 1 elements",
                f"choose --max-length {max_slots - max_slots % MIN_SLOTS} or less", where="--max-length",
            )  # fmt: skip


class _PlanRequests:
    """Iterates over the plans to build, writing each lowered graph when its turn comes; yields None for plans taken over.

    Attributes:
        gpus: what `_gpus` returns for the target.
        keys: plan's file name -> its `content_key`; complete once the iteration has ended.
        sizes: plan's path in the bundle -> bytes of its weights; complete at the same time.
    """

    def __init__(self, job: Job, target: TargetRequest, partial: Path, engines: Sequence[_Engine], tied: str | None) -> None:
        self._job, self._target, self._partial, self._engines, self._tied = job, target, partial, engines, tied
        self._folder, replaced = f"targets/{target.name}", job.request.out
        self._timing_cache = keep_timings(replaced, partial, self._folder) if target.name == "tensorrt" else None
        self._known = known_plans(replaced, self._folder)
        self.gpus = _gpus(target)
        self.keys: dict[str, str] = {}
        self.sizes: dict[str, int] = {}

    def __iter__(self) -> Iterator[PlanRequest | None]:
        version = library(self._target.name).__version__
        for engine in self._engines:
            lowered = lower(engine.graph, engine.slots, self._tied, self._job.quantization)
            path = f"{self._folder}/{engine.name}.plan"
            # next to the weights that it refers to, and named after its layers: its own weights' file name is part of the key
            source = self._partial / manifest.GRAPHS / f"lowered_{engine.graph.graph.name}.onnx"
            move_to_file(lowered.graph.initializers.values(), source.with_suffix(".bin"))
            request = PlanRequest(
                target=self._target.name, source=str(source), plan=str(self._partial / path), profiles=engine.profiles,
                capabilities=self._target.capabilities, options=self._job.request.builder, timing_cache=self._timing_cache,
            )  # fmt: skip
            self.sizes[path] = weight_bytes(lowered.graph)
            self.keys[Path(path).name] = key = content_key(request, lowered, version, self.gpus)
            if key in self._known and take_over(self._known[key], self._partial / path):
                remove_lowered(source)
                yield None
            else:
                ir.save(lowered, source)
                yield request


def _engines(job: Job, graphs: StandardGraphs) -> list[_Engine]:
    """All engines, the largest (the segments) first."""
    decode = Profile(batch=(1, 1, job.limits.max_batch), tokens=(1, 1, 1))
    slots = slots_of_plans(job.skeleton, job.schedule, job.limits.max_length)
    engines = []
    for index, layers in enumerate(job.plan.segments):
        # named by its layers, not by its index, so that another schedule's plan of the same layers is the same plan
        graph = stitch([graphs.layers[layer] for layer in layers], name=f"layers_{layers[0]:03d}_{layers[-1]:03d}")
        num_slots = slots[layers[0]]  # with an absolute anchor a layer may have fewer slots than a pass has tokens
        profiles = (decode, _prompt_profile(min(PREFILL_CHUNK, num_slots)))
        engines.append(_Engine(name=f"segment_{index:03d}", graph=graph, slots=num_slots, profiles=profiles))
    return [
        *engines,
        _Engine(name="embed", graph=graphs.embed, slots=0, profiles=(decode, _prompt_profile(PREFILL_CHUNK))),
        _Engine(name="head", graph=graphs.head, slots=0, profiles=(decode,)),
    ]


def _prompt_profile(tokens: int) -> Profile:
    return Profile(batch=(1, 1, 1), tokens=(1, min(128, tokens), tokens))


def lower(graph: ir.Model, slots: int, tied: str | None, quantization: Quantization | None) -> ir.Model:
    """Lower a copy of a standard graph to what the library takes.

    Args:
        slots: of each layer's KV buffer.
        tied: name of the weight that embedding and head share, if they share one.
    """
    lowered, name = graph.clone(), graph.graph.name
    passes: list[ir.passes.PassBase] = [FreezeSlotsPass(slots=slots), WriteOutAttentionPass(slots=slots)]
    passes += [TurnQueriesIntoTokensPass(slots=slots), AvoidUnitScalePass()]
    passes += [SplitProductsPass()] if not quantization else []
    passes += [WriteOutConvolutionPass(), WriteOutLinearAttentionPass(max_tokens=min(PREFILL_CHUNK, slots))]
    passes += [WriteOutExpertsPass(), SplitNormScalesPass(), DropUnusedInputsPass()]
    passes += [ShareTiedWeightPass(tied)] if tied else []
    passes += [SplitTablePass(max_elements=_MAX_ELEMENTS)]
    if quantization and name != "embed":
        scheme = quantization.outer if name == "head" else quantization
        passes += [SliceGathersPass(), PackProductsPass(), QuantizePlanWeightsPass(scheme), QuantizePlanExpertsPass(scheme)]
    passes += [WidenLogitsPass()] if name == "head" else []
    run_passes(lowered, passes)
    return lowered


def slots_of_plans(skeleton: Skeleton, schedule: Schedule, max_length: int) -> tuple[int, ...]:
    """Slots of each layer's KV buffer in plans for rows of at most `max_length` tokens."""
    return static_slots(schedule, max_length, skeleton.state_layers, skeleton.keys, HALF_BYTES)
