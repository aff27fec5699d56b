"""Every variant against the torch reference, on the same inputs: logits, tokens, and the KV buffer layer by layer."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from skipdecode.bindings import PAST
from skipdecode.child_process import command_of
from skipdecode.decoder import Decoder
from skipdecode.engines.tensorrt_library import LIBRARIES
from skipdecode.errors import ModelNotSupportedError
from skipdecode.generate import Generator
from skipdecode.manifest import Manifest
from skipdecode.schedule import Schedule
from skipdecode.validation.latency import tour

NEW_TOKENS = 8
PROMPT_LENGTHS = (23, 7, 1)  # a ragged batch, longest first as Decoder requires
# Only a prompt this long shows errors of a sliding window, a scaled rope, a second chunk of 512 tokens, or attention's kernel for
# many positions. torch takes minutes for it if a model is large, hence few steps, and only of the deepest variant, which runs
# every engine. Windows of 600 tokens or more are not covered. The models that have them (Gemma 3: 1024, Mistral: 4096) have
# billions of parameters: torch, in fp32 and recomputing the whole sequence at every step, would take two to seven times as long,
# and gigabytes for its logits.
LONG_PROMPT_LENGTHS = (600, 1)
LONG_NEW_TOKENS = 3
TOLERANCE = 1e-3  # relative to the largest logit, for engines with exact weights
# Upper bounds for all other weights, on the median step of the worst row. Not on the largest error: rounding can make a mixture
# choose another expert, so that single logits of a good bundle are off by half of the largest. The bounds are wide because random
# weights, which tests use, suffer more than trained ones. Measured with prompts of up to 600 tokens: a trained OPT in int8 0.01,
# int4 0.08 .. 0.13; random Llama and Mixtral in int4 0.6; random Qwen3.5, OLMo Hybrid and Jamba, whose states accumulate errors,
# in int8 0.2, in int4 1.2; on a GPU (largest error over largest logit) fp16 up to 0.02, bf16 0.15. A different model of the same
# shape gives 1.3 .. 1.6, mostly 1.4, as independent logits do.
MEDIAN_TOLERANCES = {"fp16": 0.2, "bf16": 0.4, "int8": 0.4, "int4": 1.25}
# What rounding alone changes differs from model to model, so the reference is also run with rounded weights. A quantised bundle
# may be so many times as far off: it is rounded in other blocks, and engines for a CPU round activations to 8 bits, too.
ROUNDING_FACTORS = {"int8": 6, "int4": 2}

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class _Run:
    """What both the runtime and the reference generate."""

    name: str
    schedule: Schedule
    prompts: list[list[int]]
    new: int  # tokens


def check_reference(manifest: Manifest, model: str) -> None:
    """Check that `model` has the bundle's dimensions, before anything slow starts.

    Raises:
        ModelNotSupportedError: it has others, or cannot be read; or the `export` extra is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        _run_reference({"model": model, "dimensions": _dimensions(manifest), "check": True}, Path(folder) / "none")


def measure_parity(generator: Generator, model: str) -> list[dict[str, Any]]:
    """Errors against the reference over all prompts and steps, for each variant, deepest first, and then for a long prompt.

    The runtime is fed the reference's tokens, so that one early difference does not hide the rest. Errors of logits and of keys
    and values are absolute. `relative_error` is the largest logit error over the largest logit. `median_error` is the norm of a
    step's errors over the norm of its logits, as the median of a row's steps, for the worst row. `holds` says whether the error
    named by `judged_by` is at most `bound`, which is relative to what `bound_of` says. `rounding_error` is, for a quantised
    target, the `median_error` of the reference itself once its weights are rounded.
    """
    manifest = generator.manifest
    with tempfile.TemporaryDirectory() as folder:
        out, runs = Path(folder) / "reference.safetensors", _runs(generator)
        request = {
            "model": model, "dtype": manifest.dtype, "dimensions": _dimensions(manifest),
            "runs": {
                run.name: {
                    "layers": run.schedule.layers, "warmup_layers": run.schedule.warmup_layers, "prompts": run.prompts,
                    "new": run.new,
                }
                for run in runs
            },
        }  # fmt: skip
        if generator.target.weights in ROUNDING_FACTORS:
            bits = int(generator.target.weights.removeprefix("int"))
            request["rounding"] = {"bits": bits, "whole_rows": bits == 8 and generator.target.name in LIBRARIES}
        _run_reference(request, out)
        reference = load_file(out)
    rows = [{"name": run.name, **_compare(generator, run, reference)} for run in runs]
    bound = _bound(generator.target.weights, rows)
    return [row | _verdict(generator.target.weights, bound, row) for row in rows]


def _runs(generator: Generator) -> list[_Run]:
    """Each variant on short prompts, then the deepest one on a long prompt if the bundle takes one."""
    variants, own = generator.manifest.variants, generator.manifest.schedule
    short = _prompts(generator, PROMPT_LENGTHS, NEW_TOKENS)
    runs = [_Run(each.name, tour(own, [each.num_layers]), short, NEW_TOKENS) for each in variants]
    long = _prompts(generator, LONG_PROMPT_LENGTHS, LONG_NEW_TOKENS)
    if len(long[0]) > PROMPT_LENGTHS[0]:
        deepest = max(variants, key=lambda variant: variant.num_layers)
        name = f"{deepest.name}, {len(long[0])} tokens"
        runs.append(_Run(name, tour(own, [deepest.num_layers]), long, LONG_NEW_TOKENS))
    return runs


def _bound(weights: str, rows: list[dict[str, Any]]) -> float:
    """The largest error that holds, for all runs alike: in which of them a mixture chooses other experts is up to chance."""
    if weights == "fp32":
        return TOLERANCE
    if weights not in ROUNDING_FACTORS:
        return MEDIAN_TOLERANCES[weights]
    rounding = ROUNDING_FACTORS[weights] * max(row["rounding_error"] for row in rows)
    return float(min(MEDIAN_TOLERANCES[weights], max(TOLERANCE, rounding)))  # nothing may have been rounded


def _verdict(weights: str, bound: float, errors: dict[str, Any]) -> dict[str, Any]:
    if weights == "fp32":
        by, of = "relative_error", "the largest logit"
    else:
        by, of = "median_error", "the median step's logits"
    holds = bool(errors[by] <= bound) and math.isfinite(errors["relative_error"])
    return {"holds": holds, "judged_by": by, "bound": bound, "bound_of": of}


def _compare(generator: Generator, run: _Run, reference: Arrays) -> dict[str, Any]:
    name, prompts, new = run.name, run.prompts, run.new
    decoder = generator.decoder([len(prompt) for prompt in prompts], new, run.schedule)
    tokens = np.stack([reference[f"{name}.{row}.tokens"] for row in range(len(prompts))])  # [B, new]
    expected = np.stack([reference[f"{name}.{row}.logits"] for row in range(len(prompts))])  # [B, new, V]
    logits = np.empty_like(expected)
    decoder.prefill(prompts)
    for step in range(new):
        if step:
            decoder.decode_step(tokens[:, step - 1])
        logits[:, step] = decoder.logits
    errors = np.abs(logits - expected)
    rounded = [reference[key] for row in range(len(prompts)) if (key := f"{name}.{row}.rounded") in reference]
    differs = np.flatnonzero((logits.argmax(-1) != tokens).any(axis=0))
    return {
        "max_logit_error": float(errors.max()),
        "mean_logit_error": float(errors.mean()),
        "relative_error": float(errors.max() / np.abs(expected).max()),
        "median_error": _median_error(logits, expected),
        "rounding_error": _median_error(np.stack(rounded), expected) if rounded else None,
        "first_token_that_differs": int(differs[0]) if len(differs) else None,
        "kv": [_compare_kv(decoder, layer, len(prompts), reference, name) for layer in run.schedule.active(0)],
    }


def _median_error(logits: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """The median step's error of the worst row; logits [B,new,V]."""
    step_errors = np.linalg.norm(logits - expected, axis=-1) / np.linalg.norm(expected, axis=-1)  # [B, new]
    # one logit for all tokens says nothing, but zeros would be off by only 1
    step_errors[np.ptp(logits, axis=-1) == 0] = math.inf
    return float(np.median(step_errors, axis=1).max())


def _compare_kv(decoder: Decoder, layer: int, rows: int, reference: Arrays, name: str) -> dict[str, Any]:
    """The largest error of each array that a layer keeps, over all rows and their valid positions."""
    worst: dict[str, float] = {}
    for row in range(rows):
        for past, part in decoder.kv.layer_arrays(layer, slice(row, row + 1)).items():
            expected = reference[f"{name}.{row}.{past}"]
            array = decoder.memory.to_host(part)[0][tuple(map(slice, expected.shape))]  # its valid positions
            kind = past.removeprefix(PAST).removesuffix(f".{layer}")
            worst[kind] = max(worst.get(kind, 0.0), float(np.abs(array - expected).max()))
    return {"layer": layer, **{f"max_{kind}_error": error for kind, error in worst.items()}}


def _prompts(generator: Generator, lengths: tuple[int, ...], new: int) -> list[list[int]]:
    """Prompts of random ids, longest first: `lengths`, cut to what the bundle takes with `new` more tokens, and to its rows."""
    limits, rng = generator.manifest.limits, np.random.default_rng(0)
    max_prompt = min(limits.max_length, *(generator.engines.slots or (limits.max_length,))) - new
    prompt_lengths = sorted({max(1, min(length, max_prompt)) for length in lengths}, reverse=True)[: limits.max_batch]
    return [rng.integers(0, generator.manifest.model.vocab_size, length).tolist() for length in prompt_lengths]


def _dimensions(manifest: Manifest) -> dict[str, Any]:
    names = ("model_type", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "vocab_size", "state_layers")
    return {name: value for name, value in dataclasses.asdict(manifest.model).items() if name in names}


def _run_reference(request: dict[str, Any], out: Path) -> None:
    """Run the reference, which needs torch, in its own process, whose end releases its memory."""
    command = command_of("skipdecode.exporter.reference_run", str(out))
    request_json = json.dumps({**request, "parent": os.getpid()})
    process = subprocess.run(command, input=request_json, capture_output=True, text=True, check=False)
    if process.returncode == 0:
        return
    line = (process.stderr.strip().splitlines() or ["no output"])[-1]
    if process.returncode == 2:
        raise ModelNotSupportedError(line)  # one line already: what, where, what to do
    if "ModuleNotFoundError" in line:
        raise ModelNotSupportedError(f"needs the export extra ({line})", "pip install 'skipdecode[export]'", where="--reference")
    killed = process.returncode < 0 or "memory" in line.lower()
    remedy = "check that it fits in memory" if killed else "check that transformers loads it"
    raise ModelNotSupportedError(f"the reference ended with status {process.returncode} ({line})", remedy, where="--reference")
