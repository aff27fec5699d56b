"""Every variant against the torch reference, on the same inputs: logits, tokens, and the KV buffer layer by layer."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from skipdecode.bindings import PAST
from skipdecode.child_process import command_of
from skipdecode.decoder import Decoder
from skipdecode.errors import ModelNotSupportedError
from skipdecode.generate import Generator
from skipdecode.manifest import Manifest
from skipdecode.schedule import Schedule
from skipdecode.validation.latency import tour

NEW_TOKENS = 8
PROMPT_LENGTHS = (23, 7, 1)  # longest first, as Decoder wants them: a ragged batch
TOLERANCE = 1e-3  # of the largest logit, for engines with exact weights; quantised ones are told, and gated by an SLO

Arrays = dict[str, np.ndarray[Any, Any]]


def check_reference(manifest: Manifest, model: str) -> None:
    """Whether `model` has the bundle's dimensions, before anything long starts.

    Raises:
        ModelNotSupportedError: it has not, or cannot be read; or the `export` extra is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        _ask({"model": model, "dimensions": _dimensions(manifest), "check": True}, Path(folder) / "none")


def measure_parity(generator: Generator, model: str) -> list[dict[str, Any]]:
    """For each variant, most layers first: errors against the reference over all prompts and steps.

    The runtime is fed the reference's tokens, so that one early difference does not hide the rest. Errors are absolute, of
    logits and of keys and values; `relative_error` is the largest over the largest logit.
    """
    manifest = generator.manifest
    prompts = _prompts(manifest)
    schedules = {variant.name: tour(manifest.schedule, [variant.num_layers]) for variant in manifest.variants}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "reference.safetensors"
        request = {
            "model": model, "dtype": manifest.dtype, "dimensions": _dimensions(manifest), "prompts": prompts, "new": NEW_TOKENS,
            "schedules": {
                name: {"layers": schedule.layers, "warmup_layers": schedule.warmup_layers} for name, schedule in schedules.items()
            },
        }  # fmt: skip
        _ask(request, out)
        reference = load_file(out)
    exact = generator.target.weights == "fp32"
    rows = []
    for name, schedule in schedules.items():
        row = _compare(generator, schedule, prompts, reference, name)
        holds = bool(row["relative_error"] <= TOLERANCE) if exact or not math.isfinite(row["relative_error"]) else None
        rows.append({"name": name, "holds": holds, **row})
    return rows


def _compare(generator: Generator, schedule: Schedule, prompts: list[list[int]], reference: Arrays, name: str) -> dict[str, Any]:
    decoder = generator.decoder([len(prompt) for prompt in prompts], NEW_TOKENS, schedule)
    tokens = np.stack([reference[f"{name}.{row}.tokens"] for row in range(len(prompts))])  # [B, new]
    wanted = np.stack([reference[f"{name}.{row}.logits"] for row in range(len(prompts))])  # [B, new, V]
    found = np.empty_like(wanted)
    decoder.prefill(prompts)
    for step in range(NEW_TOKENS):
        if step:
            decoder.decode_step(tokens[:, step - 1])
        found[:, step] = decoder.logits
    errors = np.abs(found - wanted)
    differs = np.flatnonzero((found.argmax(-1) != tokens).any(axis=0))
    return {
        "max_logit_error": float(errors.max()),
        "mean_logit_error": float(errors.mean()),
        "relative_error": float(errors.max() / np.abs(wanted).max()),
        "first_token_that_differs": int(differs[0]) if len(differs) else None,
        "kv": [_compare_kv(decoder, layer, len(prompts), reference, name) for layer in schedule.active(0)],
    }


def _compare_kv(decoder: Decoder, layer: int, rows: int, reference: Arrays, name: str) -> dict[str, Any]:
    """Largest error of each array that one layer keeps, over all rows and their valid positions."""
    worst: dict[str, float] = {}
    for row in range(rows):
        for past, part in decoder.kv.rows(layer, slice(row, row + 1)).items():
            wanted = reference[f"{name}.{row}.{past}"]
            found = decoder.memory.to_host(part)[0][tuple(map(slice, wanted.shape))]  # its valid positions
            kind = past.removeprefix(PAST).removesuffix(f".{layer}")
            worst[kind] = max(worst.get(kind, 0.0), float(np.abs(found - wanted).max()))
    return {"layer": layer, **{f"max_{kind}_error": error for kind, error in worst.items()}}


def _prompts(manifest: Manifest) -> list[list[int]]:
    """As many of the lengths as the bundle takes, of random ids."""
    rng = np.random.default_rng(0)
    room = manifest.limits.max_length - NEW_TOKENS
    lengths = sorted({max(1, min(length, room)) for length in PROMPT_LENGTHS}, reverse=True)[-manifest.limits.max_batch :]
    return [rng.integers(0, manifest.model.vocab_size, length).tolist() for length in lengths]


def _dimensions(manifest: Manifest) -> dict[str, Any]:
    names = ("model_type", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "vocab_size", "state_layers")
    return {name: value for name, value in dataclasses.asdict(manifest.model).items() if name in names}


def _ask(request: dict[str, Any], out: Path) -> None:
    """Run the reference, which needs torch, in a process of its own: its memory goes with it."""
    command = command_of("skipdecode.exporter.reference_run", str(out))
    given = json.dumps({**request, "parent": os.getpid()})
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    line = (done.stderr.strip().splitlines() or ["the reference said nothing"])[-1]
    if done.returncode == 2:
        raise ModelNotSupportedError(line)  # one line already: what, where, what to do
    if "ModuleNotFoundError" in line:
        raise ModelNotSupportedError(f"needs the export extra ({line})", "pip install 'skipdecode[export]'", where="--reference")
    killed = done.returncode < 0 or "memory" in line.lower()
    remedy = "see whether it fits in memory" if killed else "see whether transformers loads it"
    raise ModelNotSupportedError(f"the reference ended with status {done.returncode} ({line})", remedy, where="--reference")
