"""The whole of `skip-validate`: check the request, then measure, one journal entry at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from skipdecode import manifest as manifests
from skipdecode.bundle_facts import facts
from skipdecode.cpu import usable_cores
from skipdecode.cuda import CudaDevice
from skipdecode.cuda_driver import gpu_at_hand
from skipdecode.errors import BundleError, CapacityError, TargetError
from skipdecode.generate import Generator
from skipdecode.memory import DeviceMemory
from skipdecode.validation.baseline import compare
from skipdecode.validation.journal import Journal
from skipdecode.validation.latency import max_context, measure_cell
from skipdecode.validation.machine import ReadBandwidth, copy_gb_per_s, machine_facts, resident_bytes
from skipdecode.validation.parity import check_reference, measure_parity
from skipdecode.validation.plans import measure_plans
from skipdecode.validation.quality import Example, answer, check_examples, schedule_for, score
from skipdecode.validation.slo import Slo, judge
from skipdecode.validation.step_bytes import StepBytes
from skipdecode.validation.workload import Request, check_fits, measure_workload

FORMAT = 1
_NEW_TOKENS = 64  # by default, where the schedule's span is shorter
_MEASUREMENTS_VERSION = 4  # version of the measurements' fields; raised when they change, so that no older ones are resumed
_LIBRARIES = ("skipdecode", "onnxruntime", "numpy", "torch", "transformers", "sacrebleu", "rouge_score")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateRequest:
    """What to validate, with all files already read."""

    bundle: Path
    target: str | None = None  # None: every target of the bundle that this machine can run
    threads: int | None = None  # None: one for each usable core
    reference: str | None = None  # local folder, hub id, or opt-SIZE
    batches: tuple[int, ...] | None = None  # rows; None: 1 and 4
    contexts: tuple[int, ...] | None = None  # valid tokens a row; None: 32 and 512
    requests: tuple[Request, ...] | None = None  # the workload; None: one of `prompt_tokens` and `new_tokens` per row
    prompt_tokens: int | None = None  # None: 64, or half of the bundle's length
    new_tokens: int | None = None  # None: so many that a step reaches the schedule's end, 64 at least
    examples: tuple[Example, ...] | None = None  # of --eval
    examples_path: Path | None = None
    speedups: tuple[float, ...] = ()  # of --eval, besides full depth and the bundle's own schedule
    slos: tuple[Slo, ...] = ()
    baseline: dict[str, Any] | None = None  # an earlier result


def validate(request: ValidateRequest, progress: Progress = lambda what: None) -> tuple[dict[str, Any], Callable[[], None]]:
    """Measure everything that was asked for.

    Returns:
        The result, whose `holds` says whether every check passed; and what to call once it is written. Until then the next run
        has the measurements of this one, which may have taken hours.

    Raises:
        SkipDecodeError: bad input, before anything slow starts.
        BundleError: also if the bundle is replaced before all of it was read.
    """
    with manifests.one_bundle(request.bundle):  # read again by each target's load, by the journal and by the hashes
        manifest = manifests.read(request.bundle)
        try:
            generators, resident = _load(request, manifest)
        except BundleError as error:  # the hashes tell more about the damage than the error of the library that hit it
            return _damaged(request, manifest, error, progress), lambda: None
        loaded = [generator for generator in generators.values() if isinstance(generator, Generator)]
        request = _fill_defaults(request, manifest, min(map(max_context, loaded)), _longest_prompt(request, loaded[0]))
        _check(request, manifest, loaded[0])
        machine = {**machine_facts(_LIBRARIES), "gpu": _gpu(loaded)}
        journal = Journal(_identity(request, machine))
        integrity = _integrity(manifest, request.bundle, progress)  # never from the journal: files may have changed
    result = _head(request, manifest, machine, integrity, journal.resumed)
    result["targets"] = [
        _measure_target(name, generator, resident.get(name, 0), request, journal, progress)
        for name, generator in generators.items()
    ]
    ran = [target for target in result["targets"] if target["runs"]]
    result["slo"] = [{"target": target["name"], **row} for target in ran for row in judge(list(request.slos), target)]
    result["baseline"] = compare(result, request.baseline) if request.baseline else None
    parities = [row["holds"] for target in ran for row in (*(target["parity"] or ()), *(target["plans"] or ()))]
    judged = [row["holds"] for row in result["slo"]]
    result["holds"] = integrity["holds"] and all(parities) and all(judged)
    return result, journal.finish


def _damaged(request: ValidateRequest, manifest: manifests.Manifest, error: BundleError, progress: Progress) -> dict[str, Any]:
    """The result for a bundle that cannot be loaded because a file is not what the manifest says; else raises `error`."""
    integrity = _integrity(manifest, request.bundle, progress)
    if integrity["holds"]:
        raise error
    head = _head(request, manifest, {**machine_facts(_LIBRARIES), "gpu": None}, integrity, 0)
    targets = [{"name": target.name, "runs": False, "why": str(error)} for target in manifest.targets]
    return {**head, "targets": targets, "slo": [], "baseline": None, "holds": False}


def _head(
    request: ValidateRequest, manifest: manifests.Manifest, machine: dict[str, Any], integrity: dict[str, Any], resumed: int
) -> dict[str, Any]:
    """What a result says besides its measurements, `resumed` of which come from a run that was stopped."""
    return {
        "validation_format": FORMAT, "measured_at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "machine": machine,
        "bundle": facts(manifest), "settings": _settings(request), "resumed": resumed, "integrity": integrity,
    }  # fmt: skip


def _gpu(loaded: Sequence[Generator]) -> str | None:
    """The name of the GPU that a target runs on; None: none does."""
    memories = [generator.engines.memory for generator in loaded]
    on_gpu = any(isinstance(memory, DeviceMemory) and memory.device.name == CudaDevice.name for memory in memories)
    return gpu_at_hand().name if on_gpu else None


def _longest_prompt(request: ValidateRequest, generator: Generator) -> int:
    """Tokens of the longest example's prompt; 0 if there are no examples."""
    return max(map(len, generator.encode([example.prompt for example in request.examples or ()])), default=0)


def _fill_defaults(
    request: ValidateRequest, manifest: manifests.Manifest, longest_context: int, longest_prompt: int
) -> ValidateRequest:
    """Fill in defaults that fit the bundle, and check given values against it. Lengths are in valid tokens."""
    limits, span = manifest.limits, manifest.schedule.span
    if longest_context < 1:
        raise CapacityError(
            f"a length of {limits.max_length} leaves no room to measure {len(manifest.variants)} variants",
            "export with a larger --max-length", where=str(request.bundle),
        )  # fmt: skip
    rows = min(limits.max_batch, len(request.requests or ()) or limits.max_batch)
    batches = request.batches or tuple(sorted({min(batch, rows) for batch in (1, 4)}))
    contexts = request.contexts or tuple(sorted({max(1, min(context, longest_context)) for context in (32, 512)}))
    for option, values, bound in (("--batch", batches, limits.max_batch), ("--context", contexts, longest_context)):
        for value in values:
            if not 1 <= value <= bound:
                raise CapacityError(
                    f"{value}: the bundle takes 1..{bound}", "choose another, or export the model again", where=option
                )
    prompt = request.prompt_tokens or min(64, limits.max_length // 2)
    most = min(_NEW_TOKENS, limits.max_length - longest_prompt)
    new = request.new_tokens or max(2, min(max(span + 1, most), limits.max_length - prompt))
    return dataclasses.replace(request, batches=batches, contexts=contexts, prompt_tokens=prompt, new_tokens=new)


def _load(request: ValidateRequest, manifest: manifests.Manifest) -> tuple[dict[str, Generator | str], dict[str, int]]:
    """By target: its generator, or why it does not run here; and bytes resident with it alone. At least one target must run."""
    known = [target.name for target in manifest.targets] or [manifest.default_target]  # which is refused where there is none
    names = [request.target] if request.target else known
    loaded: dict[str, Generator | str] = {}
    resident: dict[str, int] = {}
    failure: TargetError | None = None
    other_bytes = 0  # bytes of the targets loaded so far
    for name in names:
        before = resident_bytes()
        try:
            loaded[name] = Generator(request.bundle, target=name, threads=request.threads)
            after = resident_bytes()
            resident[name] = after - other_bytes
            other_bytes += after - before
        except TargetError as error:
            failure = error
            loaded[name] = str(error)
    if failure is not None and all(isinstance(value, str) for value in loaded.values()):
        raise failure
    return loaded, resident


def _check(request: ValidateRequest, manifest: manifests.Manifest, generator: Generator) -> None:
    """Check everything about the input that can be known before measuring."""
    where = "--workload" if request.requests else "--prompt-tokens and --new-tokens"
    for rows in request.batches or ():
        check_fits(_requests(request, rows), rows, generator, where)
    for speedup in request.speedups:
        schedule_for(manifest, speedup)
    if request.examples is not None:
        assert request.examples_path is not None and request.new_tokens is not None
        check_examples(request.examples, generator, request.new_tokens, request.examples_path)
    if request.reference is not None:
        check_reference(manifest, request.reference)


def _requests(request: ValidateRequest, batch: int) -> tuple[Request, ...]:
    assert request.prompt_tokens and request.new_tokens
    return request.requests or (Request(prompt_tokens=request.prompt_tokens, new_tokens=request.new_tokens),) * batch


def _integrity(manifest: manifests.Manifest, bundle: Path, progress: Progress) -> dict[str, Any]:
    progress("comparing every file's SHA-256")
    try:
        manifests.check_hashes(manifest, bundle)
        return {"holds": True, "files": len(manifest.files), "what": None}
    except BundleError as error:
        return {"holds": False, "files": len(manifest.files), "what": f"{error.where}: {error.what}"}


def _measure_target(
    name: str, generator: Generator | str, resident: int, request: ValidateRequest, journal: Journal, progress: Progress
) -> dict[str, Any]:
    if isinstance(generator, str):
        return {"name": name, "runs": False, "why": generator}

    def once(what: str, measure: Callable[[], Any]) -> Any:
        progress(f"{name}: {what}")
        return journal.once(f"{name}: {what}", measure)

    assert request.batches and request.contexts
    step_bytes = StepBytes(manifest=generator.manifest, target=generator.target)
    memory = once("memory", lambda: {"resident_bytes": resident, "load_s": generator.load_s})
    parity = once("parity", lambda: measure_parity(generator, request.reference or "")) if request.reference else None
    plans = once("plans", lambda: measure_plans(generator)) if generator.engines.slots else None
    threads = request.threads or usable_cores()
    gb_per_s = once("memory bandwidth", lambda: _gb_per_s(generator, threads))
    latency = [
        once(f"batch {rows}, context {context}", partial(measure_cell, generator, step_bytes, rows, context, gb_per_s))
        for rows in request.batches
        for context in request.contexts
    ]
    workloads = [
        once(f"workload, batch {rows}", partial(measure_workload, generator, step_bytes, _requests(request, rows), rows))
        for rows in request.batches
    ]
    return {
        "name": name, "runs": True, "weights": generator.target.weights, "threads": threads, "memory": memory,
        "read_gb_per_s": gb_per_s, "parity": parity, "plans": plans, "latency": latency, "workloads": workloads,
        "quality": _measure_quality(generator, request, once) if request.examples else None,
    }  # fmt: skip


def _gb_per_s(generator: Generator, threads: int) -> float:
    memory = generator.engines.memory
    return copy_gb_per_s(memory.device) if isinstance(memory, DeviceMemory) else ReadBandwidth(threads).gb_per_s()


def _measure_quality(
    generator: Generator, request: ValidateRequest, once: Callable[[str, Callable[[], Any]], Any]
) -> list[dict[str, Any]]:
    """Score full depth, the bundle's own schedule and the requested speedups; losses are against full depth."""
    manifest, examples, new = generator.manifest, request.examples, request.new_tokens
    assert examples is not None and new is not None
    schedules = {"full depth": schedule_for(manifest, 1.0), "bundle's own": manifest.schedule}
    schedules |= {f"{speedup:g}x": schedule_for(manifest, speedup) for speedup in request.speedups if speedup != 1}
    rows: list[dict[str, Any]] = []
    for name, schedule in schedules.items():
        answers = once(f"answers, {name}", partial(answer, generator, examples, schedule, new))
        scores = once(f"scores, {name}", partial(score, answers["texts"], examples, rows[0]["texts"] if rows else None))
        rows.append({"name": name, "own": name == "bundle's own", **answers, **scores})
    return rows


def _settings(request: ValidateRequest) -> dict[str, Any]:
    """The request as plain JSON: a workload as its requests, examples as their number."""
    return {
        "target": request.target, "threads": request.threads, "reference": request.reference,
        "batches": list(request.batches or ()), "contexts": list(request.contexts or ()),
        "workload": [dataclasses.asdict(one) for one in request.requests] if request.requests else None,
        "prompt_tokens": request.prompt_tokens, "new_tokens": request.new_tokens,
        "examples": len(request.examples) if request.examples else None, "speedups": list(request.speedups),
        "slo": [str(slo) for slo in request.slos],
    }  # fmt: skip


def _identity(request: ValidateRequest, machine: dict[str, Any]) -> dict[str, Any]:
    """What the measurements depend on: bundle, reference, machine, versions and settings, but not objectives or outputs."""
    examples = [dataclasses.astuple(example) for example in request.examples or ()]
    manifest = (request.bundle / manifests.MANIFEST).read_bytes()
    return {
        "format": FORMAT, "rows": _MEASUREMENTS_VERSION, "bundle": hashlib.sha256(manifest).hexdigest(), "machine": machine,
        "settings": {**_settings(request), "slo": None}, "examples": examples,
        "files": [_file_stamps(Path(folder)) for folder in (request.bundle, request.reference) if folder is not None],
    }  # fmt: skip


def _file_stamps(folder: Path) -> list[tuple[str, int, int]]:
    """Path, size in bytes and modification time (ns) of every file in `folder`; none if it is a hub id."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
