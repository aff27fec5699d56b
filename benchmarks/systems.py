"""Which systems take part in a decode run, on which models and kinds of weights; and their files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conversions import to_ctranslate2, to_genai, to_gguf
from models import make_bundles
from native_peers import GenAi, LlamaCpp
from peers import CTranslate2, Run, SkipDecode, TorchCompile, Transformers
from worker import Worker, in_process

from skipdecode.validation.step_bytes import StepBytes


@dataclass(slots=True, kw_only=True)
class System:
    """One system and the results of its rounds."""

    name: str
    kind: str  # of weights: fp32, int8, int4
    start: Callable[[], Worker]
    first_point_only: bool = False  # measured at the first point with all others, then left out
    reads: StepBytes | None = None  # what its bundle's steps read; this runtime only
    worker: Worker | None = None
    runs: list[Run] = field(default_factory=list)

    def call(self, method: str, *args: Any) -> Any:
        """Call the worker, which is started first if it is not running."""
        if self.worker is None:
            self.worker = self.start()
        return self.worker.call(method, *args)

    def memory_mib(self) -> dict[str, float]:
        """Resident memory of the worker."""
        assert self.worker is not None, "it has not been called yet"
        return self.worker.memory_mib()

    def close(self) -> None:
        """End the worker, if there is one."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def missing_peers() -> list[str]:
    """Peers whose packages are not installed."""
    packages = {"CTranslate2": "ctranslate2", "ONNX Runtime GenAI": "onnxruntime_genai", "llama.cpp": "llama_cpp"}
    return [title for title, package in packages.items() if importlib.util.find_spec(package) is None]


def make_systems(
    model: str,
    checkpoint: Path,
    kinds: Sequence[str],
    speedups: Sequence[float],
    span: int,
    threads: int,
    block: int,
    smoke: bool,
) -> list[System]:
    """Write every system's files next to `checkpoint`.

    The first kind gets full depth and all speedups, the others full depth and the first speedup.

    Args:
        block: of quantised weights, here and in ONNX Runtime GenAI; CTranslate2's is a matrix row, llama.cpp's 32 inputs.
        smoke: leave out torch.compile, which takes a minute or more per model, and export in the process that made `checkpoint`.
    """
    folder, systems, missing = checkpoint.parent, [], missing_peers()
    bundles = [
        (kind, speedup, folder / f"{kind}-{speedup}")
        for kind in kinds for speedup in (None, *(speedups if kind == kinds[0] else speedups[:1]))
    ]  # fmt: skip
    step_bytes = in_process(make_bundles, checkpoint, bundles, span, block, shared=smoke)
    for (kind, speedup, bundle), reads in zip(bundles, step_bytes, strict=True):
        systems.append(
            System(
                name=f"skipdecode {kind} {'full depth' if speedup is None else f'{speedup:g}x'}", kind=kind,
                start=lambda bundle=bundle: Worker(SkipDecode, bundle, threads),  # type: ignore[misc]
                first_point_only=speedup in speedups[1:], reads=reads,
            )
        )  # fmt: skip
    systems.append(System(name="transformers fp32", kind="fp32", start=lambda: Worker(Transformers, checkpoint, threads)))
    if not smoke:
        start = lambda: Worker(TorchCompile, checkpoint, threads)  # noqa: E731
        systems.append(System(name="torch.compile fp32", kind="fp32", start=start, first_point_only=True))
    if model in ("opt", "llama", "e2e") and "CTranslate2" not in missing:
        systems += [_ctranslate2(checkpoint, folder, kind, threads) for kind in ("fp32", "int8") if kind in kinds]
    if model == "llama" and "ONNX Runtime GenAI" not in missing:
        systems += [_genai(checkpoint, folder, kind, threads, block) for kind in ("fp32", "int4") if kind in kinds]
    if model in ("llama", "mixtral") and "llama.cpp" not in missing:
        systems += [_llama_cpp(checkpoint, folder, kind, threads) for kind in kinds]
    return systems


def _ctranslate2(checkpoint: Path, folder: Path, kind: str, threads: int) -> System:
    out = folder / f"ctranslate2-{kind}"
    in_process(to_ctranslate2, checkpoint, out, kind)
    compute = {"fp32": "float32", "int8": "int8"}[kind]
    return System(name=f"ctranslate2 {kind}", kind=kind, start=lambda: Worker(CTranslate2, out, threads, compute))


def _genai(checkpoint: Path, folder: Path, kind: str, threads: int, block: int) -> System:
    out = folder / f"genai-{kind}"
    to_genai(checkpoint, out, kind, threads, block)
    return System(name=f"ort-genai {kind}", kind=kind, start=lambda: Worker(GenAi, out, threads))


def _llama_cpp(checkpoint: Path, folder: Path, kind: str, threads: int) -> System:
    out = folder / f"{kind}.gguf"
    in_process(to_gguf, checkpoint, out, kind)
    return System(name=f"llama.cpp {kind}", kind=kind, start=lambda: Worker(LlamaCpp, out, threads))
