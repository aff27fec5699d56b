"""Every test here needs a GPU that the installed ONNX Runtime can use; elsewhere it is skipped, with what is missing."""

from __future__ import annotations

import ctypes

import onnxruntime as ort
import pytest


def _missing() -> str | None:
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        return "the installed onnxruntime has no CUDA provider (pip install onnxruntime-gpu)"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no GPU"
    return None


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    reason = _missing()
    if reason:
        pytest.skip(reason)
    import torch  # noqa: F401  its CUDA libraries are what ONNX Runtime finds
