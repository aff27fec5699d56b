"""`--target cpu`, `--target cuda`, `--target tensorrt-rtx:sm89,sm120`: what engines are compiled for, and in which dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipdecode.engines.tensorrt_library import LIBRARIES
from skipdecode.errors import TargetError
from skipdecode.graph_passes.compile_tensorrt import library

if TYPE_CHECKING:
    import torch

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# model types whose activations outgrow fp16's 65504: they were trained in bf16, and vLLM refuses them in fp16 as well
OVERFLOW_FP16 = ("gemma2", "gemma3_text", "glm4")
_CHOICES = "choose from cpu, cuda, tensorrt-rtx[:smNN,...], tensorrt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """A target to compile engines for."""

    name: str  # cpu, cuda, tensorrt-rtx, tensorrt
    capabilities: tuple[str, ...] = ()  # sm89, ..: GPUs to build plans for; empty: the library's default

    @property
    def is_tensorrt(self) -> bool:
        """Whether its engines are TensorRT plans."""
        return self.name in LIBRARIES


def parse_targets(texts: Sequence[str]) -> tuple[TargetRequest, ...]:
    """Parse the values of `--target`.

    Raises:
        TargetError: an unknown target or compute capability, a target given twice, or a package that is not installed.
    """
    targets = tuple(map(_parse, texts))
    names = [target.name for target in targets]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate:
        remedy = "name it once" + (f", with several capabilities as {duplicate}:sm86,sm89" if duplicate == "tensorrt-rtx" else "")
        raise TargetError(f"target {duplicate} is given twice", remedy, where="--target")
    return targets


def _parse(text: str) -> TargetRequest:
    name, colon, rest = text.partition(":")
    if name not in ("cpu", "cuda", *LIBRARIES):
        raise TargetError(f"target {name!r} cannot be compiled by this version", _CHOICES, where="--target")
    if name not in LIBRARIES:
        if colon:
            raise TargetError(f"target {text!r}: {name} has no compute capabilities", f"write {name}", where="--target")
        return TargetRequest(name=name)
    trt = library(name)
    if not colon:
        return TargetRequest(name=name)
    if name == "tensorrt":
        raise TargetError(f"target {text!r}: tensorrt builds for the GPU at hand", "write tensorrt", where="--target")
    valid = [member.lower() for member in trt.ComputeCapability.__members__ if member.startswith("SM")]
    capabilities = tuple(dict.fromkeys(rest.split(",")))
    unknown = next((capability for capability in capabilities if capability not in valid), None)
    if unknown is not None:
        raise TargetError(
            f"tensorrt-rtx {trt.__version__} does not build for {unknown!r}", f"choose from {', '.join(valid)}", where="--target"
        )
    return TargetRequest(name=name, capabilities=capabilities)


def check_dtype(requested: str, targets: Sequence[TargetRequest]) -> None:
    """Refuse a `--dtype` that is wrong for every model.

    Raises:
        TargetError: an unknown dtype, or one that a target has no kernels for.
    """
    gpu = _first_gpu(targets)
    if requested not in ("auto", *_DTYPES):
        raise TargetError(f"{requested!r} is unknown", f"choose one of auto, {', '.join(_DTYPES)}", where="--dtype")
    if requested == "fp32" and gpu:
        raise TargetError(f"{gpu} has no fused attention in fp32", "choose fp16 or bf16", where="--dtype")
    if requested in ("fp16", "bf16") and not gpu:
        raise TargetError(f"{requested} on cpu: ONNX Runtime has no kernel for it", "choose fp32", where="--dtype")


def choose_dtype(requested: str, targets: Sequence[TargetRequest], config: Any) -> torch.dtype:
    """The dtype of the bundle's weights and standard graphs; `requested` has passed `check_dtype`.

    `auto` is fp32 if cpu is the only target. With a GPU target it is bf16 if the checkpoint is in bf16 or the model overflows
    fp16, else fp16. A cpu target computes in fp32 whatever is stored.
    """
    import torch  # here, so that a wrong target is refused without waiting for torch

    if requested == "auto":
        if _first_gpu(targets) is None:
            return torch.float32
        needs_bf16 = getattr(config, "dtype", None) == torch.bfloat16 or config.model_type in OVERFLOW_FP16
        return torch.bfloat16 if needs_bf16 else torch.float16
    dtype: torch.dtype = getattr(torch, _DTYPES[requested])
    return dtype


def _first_gpu(targets: Sequence[TargetRequest]) -> str | None:
    return next((target.name for target in targets if target.name != "cpu"), None)
