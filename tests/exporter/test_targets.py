"""What `--target` and `--dtype` accept, and how the rest is refused."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from skipdecode.errors import TargetError
from skipdecode.exporter.targets import OVERFLOW_FP16, TargetRequest, check_dtype, choose_dtype, parse_targets

CPU, CUDA, RTX = (TargetRequest(name=name) for name in ("cpu", "cuda", "tensorrt-rtx"))


def test_capabilities_follow_a_colon() -> None:
    assert parse_targets(["cpu", "tensorrt-rtx:sm86,sm89,sm86"]) == (
        CPU,
        TargetRequest(name="tensorrt-rtx", capabilities=("sm86", "sm89")),
    )
    assert parse_targets(["tensorrt-rtx"]) == (TargetRequest(name="tensorrt-rtx"),)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["vulkan"], "target 'vulkan' cannot be compiled by this version; choose from cpu, cuda, tensorrt-rtx"),
        (["cuda:sm90"], "cuda has no compute capabilities; write cuda"),
        (["cpu:sm89"], "cpu has no compute capabilities; write cpu"),
        (["tensorrt-rtx:sm90"], "does not build for 'sm90'; choose from sm75, sm80, sm86, sm89"),
        (["tensorrt-rtx:"], "does not build for ''"),
        (["tensorrt-rtx:sm86", "tensorrt-rtx:sm89"], "tensorrt-rtx is given twice; name it once, with several capabilities as"),
        (["cpu", "cuda", "cpu"], "cpu is given twice; name it once$"),
    ],
)
def test_what_cannot_be_compiled_is_refused(texts: list[str], says: str) -> None:
    with pytest.raises(TargetError, match=says) as caught:
        parse_targets(texts)
    assert str(caught.value).startswith("--target: ")


@pytest.mark.parametrize(
    ("target", "package", "remedy"),
    [
        ("tensorrt-rtx:sm89", "tensorrt_rtx", "pip install 'skipdecode[tensorrt-rtx]'"),
        ("tensorrt-rtx:sm89", "polygraphy", "pip install 'skipdecode[tensorrt-rtx]'"),
        ("tensorrt", "tensorrt", "docs/tensorrt.md"),
    ],
)
def test_a_missing_package_is_named(target: str, package: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # makes its import fail
    with pytest.raises(TargetError, match=f"needs the Python package {package}; {re.escape(remedy)}"):
        parse_targets([target])


@pytest.mark.parametrize(
    ("target", "package", "remedy"),
    [
        ("tensorrt", "tensorrt", "pip install 'tensorrt>=10.15'"),
        ("tensorrt-rtx:sm89", "tensorrt_rtx", "pip install 'tensorrt-rtx>=1.7'"),
    ],
)
def test_a_library_that_cannot_update_kv_buffers_is_too_old(
    target: str, package: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(__version__="0.9.1", LayerType=SimpleNamespace(ATTENTION=1)))
    with pytest.raises(TargetError) as caught:
        parse_targets([target])
    assert str(caught.value) == f"--target: {target.partition(':')[0]} 0.9.1 is too old; {remedy}"


def test_the_default_dtype_is_fp32_on_cpu_and_the_checkpoints_16_bit_one_on_gpus() -> None:
    narrow, wide = (SimpleNamespace(model_type="llama", dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert choose_dtype("auto", [CPU], narrow) == torch.float32
    assert choose_dtype("auto", [CPU, RTX], narrow) == torch.bfloat16
    assert choose_dtype("auto", [RTX], wide) == choose_dtype("auto", [CUDA], wide) == torch.float16
    assert choose_dtype("bf16", [RTX, CPU], wide) == torch.bfloat16


@pytest.mark.parametrize("kept", [torch.float32, torch.float16, torch.bfloat16, None])
def test_models_that_overflow_fp16_are_bf16_unless_fp16_is_requested(kept: torch.dtype | None) -> None:
    for model_type in OVERFLOW_FP16:
        config = SimpleNamespace(model_type=model_type, dtype=kept)
        assert choose_dtype("auto", [RTX], config) == choose_dtype("auto", [CPU, CUDA], config) == torch.bfloat16
        assert choose_dtype("auto", [CPU], config) == torch.float32
        assert choose_dtype("fp16", [CUDA], config) == torch.float16


@pytest.mark.parametrize(
    ("asked", "target", "says"),
    [
        ("fp32", RTX, "tensorrt-rtx has no fused attention in fp32; choose fp16 or bf16"),
        ("fp16", CPU, "fp16 on cpu: .*; choose fp32"),
        ("fp8", RTX, "'fp8' is unknown"),
    ],
)
def test_a_dtype_without_kernels_is_refused(asked: str, target: TargetRequest, says: str) -> None:
    with pytest.raises(TargetError, match=f"--dtype: {says}"):
        check_dtype(asked, [target])
